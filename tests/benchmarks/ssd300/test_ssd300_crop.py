"""The crop's rule of acceptance, and what is drawn how often."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from PIL import Image
from small_ssd300 import FACTS

from benchmarks.ssd300.augment import CHANGES, WHOLE, Augmentation, Crop, draw, random_crop, train_pixels

TWO_BOXES = np.array([[0.2, 0.3, 0.6, 0.7], [0.5, 0.1, 0.9, 0.45]])


class Scripted:
    """A generator that gives what a test wants: kinds, each with the crops that are tried of it.

    What is drawn besides, with these or after them, is the whole picture, or crops that are as good as any.

    Args:
        attempts: crops of a kind.
        given: a kind, then width and height as one tuple, left and top of each crop; the next kind.
    """

    def __init__(self, attempts: int, *given: object) -> None:
        self.attempts = attempts
        self.kinds: list[tuple[int, list[list[float]]]] = []
        for value in given:
            if isinstance(value, int):
                self.kinds.append((value, []))
            elif isinstance(value, tuple):
                self.kinds[-1][1].append([*value])
            else:
                self.kinds[-1][1][-1].append(value)

    def integers(self, high: int, size: int):
        assert high == 7
        self.drawn = (self.kinds + [(0, [])] * size)[:size]
        del self.kinds[:size]
        crops = [crops + [[0.5, 0.5]] * (self.attempts - len(crops)) for _, crops in self.drawn]
        self.crops = np.array([[*crop, 0.0, 0.0][:4] for tried in crops for crop in tried])
        return np.array([kind for kind, _ in self.drawn])

    def uniform(self, low: float, high: float, size: tuple[int, int]):
        assert size == (len(self.crops), 2)
        assert np.all((low <= self.crops[:, :2]) & (self.crops[:, :2] <= high))
        return self.crops[:, :2]

    def random(self, size: tuple[int, int]):
        assert size == (len(self.crops), 2)
        free = 1 - self.crops[:, :2]
        return np.divide(self.crops[:, 2:], free, out=np.zeros(size), where=free > 0)


def cropped(boxes, *given, attempts=1):
    random = Scripted(attempts, *given)
    crop = random_crop(np.array(boxes, float), FACTS, attempts, random)
    assert not random.kinds
    return crop


def test_the_whole_picture_is_one_kind_of_seven():
    crop = cropped(TWO_BOXES, 0)
    assert crop.corners == WHOLE
    assert crop.kept.all()
    np.testing.assert_array_equal(crop.boxes, TWO_BOXES)


def test_boxes_are_kept_by_their_centres_and_cut():
    crop = cropped(TWO_BOXES, 6, (0.5, 0.4), 0.1, 0.3)  # without a least overlap: 0.1 to 0.6, 0.3 to 0.7
    assert crop.kept.tolist() == [True, False]
    np.testing.assert_allclose(crop.boxes, [[0.2, 0.0, 1.0, 1.0]])


def test_a_crop_is_refused_if_one_box_overlaps_it_too_little_even_one_that_it_would_not_keep():
    crop = cropped(TWO_BOXES, 1, (0.5, 0.4), 0.1, 0.3, 0)
    assert crop.corners == WHOLE
    both = (0.7, 0.6, 0.2, 0.1)  # 0.2 to 0.9, 0.1 to 0.7, which both boxes overlap by 0.16 / 0.42 and 0.14 / 0.42
    assert cropped(TWO_BOXES, 2, both[:2], *both[2:]).kept.all()
    assert cropped(TWO_BOXES, 3, both[:2], *both[2:], 0).corners == WHOLE


def test_an_overlap_has_to_be_larger_than_the_least():
    box = [[0.0, 0.0, 0.5, 0.5]]
    # The crop is 0.5 x 1: half of it is the box.
    assert cropped(box, 3, (0.5, 1.0), 0.0, 0.0, 0).corners == WHOLE
    assert cropped(box, 2, (0.5, 1.0), 0.0, 0.0).corners == (0.0, 0.0, 0.5, 1.0)


def test_a_centre_on_the_border_is_outside():
    box = [[0.2, 0.2, 0.6, 0.6]]
    assert cropped(box, 6, (0.4, 0.4), 0.0, 0.0, 0).corners == WHOLE  # its corner is the box's centre
    assert cropped(box, 6, (0.41, 0.41), 0.0, 0.0).kept.all()


def test_a_ratio_of_shares_beyond_two_uses_up_an_attempt():
    assert cropped(TWO_BOXES, 6, (0.9, 0.4), 0).corners == WHOLE
    crop = cropped(TWO_BOXES, 6, (0.9, 0.4), (0.8, 0.4), 0.1, 0.2, attempts=50)  # 2 itself is allowed
    assert crop.corners == pytest.approx((0.1, 0.2, 0.9, 0.6))


def test_of_a_kind_as_many_crops_are_tried_as_attempts():
    refused = [(0.3, 0.3), 0.0, 0.7]
    crop = cropped(TWO_BOXES, 5, *refused * 50, 0, attempts=50)
    assert crop.corners == WHOLE
    crop = cropped(TWO_BOXES, 6, *refused * 49, (0.5, 0.4), 0.1, 0.3, attempts=50)
    assert crop.corners == pytest.approx((0.1, 0.3, 0.6, 0.7))


def test_a_box_without_area_passes_only_without_a_least_overlap():
    assert cropped([[0.3, 0.3, 0.3, 0.5]], 1, (0.9, 0.9), 0.0, 0.0, 6, (0.9, 0.9), 0.0, 0.0).kept.all()


def test_pixels_are_rounded_down():
    crop = Crop((0.1, 0.25, 0.55, 0.99), np.ones(1, bool), TWO_BOXES[:1])
    assert crop.pixels(101, 50) == (10, 12, 55, 49)


def test_kinds_are_equally_likely_and_every_crop_keeps_the_rule():
    random = np.random.default_rng(0)
    whole, crops = 0, [random_crop(np.array([[0.0, 0.0, 1.0, 1.0]]), FACTS, 50, random) for _ in range(1400)]
    for crop in crops:
        left, top, right, bottom = crop.corners
        if crop.corners == WHOLE:
            whole += 1
            continue
        width, height = right - left, bottom - top
        assert width + 1e-9 >= 0.3
        assert height + 1e-9 >= 0.3
        assert 0.5 - 1e-9 <= width / height <= 2 + 1e-9
        np.testing.assert_allclose(crop.boxes, [[0, 0, 1, 1]], atol=1e-12)
    # A box over the whole picture overlaps a crop by its area: 50 attempts nearly always find one, but for 0.9 of it.
    assert 200 <= whole <= 320


def test_changes_come_in_any_order_within_their_ranges_and_half_of_the_pictures_are_mirrored():
    random, plans = np.random.default_rng(1), []
    for _ in range(600):
        plans.append(draw(TWO_BOXES, FACTS, 1, random))
    assert len({tuple(name for name, _ in plan.colours) for plan in plans}) == 24
    for change, low, high in (
        ("brightness", 0.875, 1.125),
        ("contrast", 0.5, 1.5),
        ("saturation", 0.5, 1.5),
        ("hue", -0.05, 0.05),
    ):
        amounts = [plan.amount(change) for plan in plans]
        spread = (high - low) / 20
        assert low <= min(amounts) < low + spread
        assert high - spread < max(amounts) <= high
    assert 250 < Counter(plan.flip for plan in plans)[True] < 350


def test_mirrored_boxes_lie_where_their_pixels_do():
    picture = Image.new("RGB", (40, 20))
    picture.paste((255, 255, 255), (4, 5, 12, 15))
    box = np.array([[0.1, 0.25, 0.3, 0.75]])
    same = tuple((change, 0.0 if change == "hue" else 1.0) for change in CHANGES)
    mirrored = np.array([[0.7, 0.25, 0.9, 0.75]])
    pixels = train_pixels(picture, Augmentation(Crop(WHOLE, np.ones(1, bool), box), True, mirrored, same), 20)
    assert pixels.shape == (20, 20, 3)
    rows, columns = np.nonzero(pixels[:, :, 0] > 200)
    assert (columns.min() / 20, (columns.max() + 1) / 20) == (0.7, 0.9)
    assert (rows.min() / 20, (rows.max() + 1) / 20) == (0.25, 0.75)


def test_a_draw_mirrors_the_boxes_of_its_crop():
    random = np.random.default_rng(2)
    for _ in range(50):
        plan = draw(TWO_BOXES, FACTS, 1, random)
        expected = plan.crop.boxes
        if plan.flip:
            expected = np.stack([1 - expected[:, 2], expected[:, 1], 1 - expected[:, 0], expected[:, 3]], 1)
        np.testing.assert_array_equal(plan.boxes, expected)
        assert len(plan.boxes) == plan.crop.kept.sum() > 0


def test_a_draw_depends_on_its_generator_alone():
    first, second = (draw(TWO_BOXES, FACTS, 1, np.random.default_rng(7)) for _ in range(2))
    assert first.crop.corners == second.crop.corners
    assert (first.flip, first.colours) == (second.flip, second.colours)
