"""Drawn pictures: their boxes are where the pixels say, and everything follows from the plan."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from common.detection import drawn_pictures
from common.detection.coco_synthetic import run_lengths
from common.detection.drawn_pictures import LOOKS, MANY, SHAPES, DrawnBox, PicturePlan, draw, outlines, paint, shape_of
from common.errors import ConfigError

SIDES = (96, 160)


def plan(number=0, **changes):
    return PicturePlan(**{"seed": 5, "number": number, "classes": tuple(range(20)), "sides": SIDES, **changes})


@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=SHAPES)
def test_a_shape_reaches_every_border_of_its_box(shape):
    for height in range(1, 40):
        for width in range(max(1, height // 2), 2 * height + 1):
            inside = shape_of(shape, height, width)
            assert inside.shape == (height, width)
            rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            assert (rows[0], rows[-1], columns[0], columns[-1]) == (0, height - 1, 0, width - 1), (height, width)


def test_shapes_differ():
    drawn = [shape_of(shape, 24, 30) for shape in range(len(SHAPES))]
    for one in range(len(SHAPES)):
        for other in range(one):
            assert np.mean(drawn[one] != drawn[other]) > 0.08, (SHAPES[one], SHAPES[other])


def test_every_class_looks_different():
    looks = []
    for number in range(LOOKS):
        pixels = np.full((20, 20, 3), 112, np.uint8)
        drawn_pictures._put(pixels, DrawnBox(number, 0, 0, 20, 20), np.random.default_rng(0))
        looks.append(pixels.astype(np.int64))
    assert LOOKS >= 264
    for one in range(1, LOOKS):
        assert np.abs(np.array(looks[:one]) - looks[one]).mean((1, 2, 3)).min() > 2, one


def test_pixels_change_within_the_boxes_alone(monkeypatch):
    for number in range(20):
        drawn, boxes = paint(plan(number, crowd=0.5, tiny=0.5))
        with monkeypatch.context() as patched:
            patched.setattr(drawn_pictures, "_fill", lambda *_: None)
            bare, _ = paint(plan(number, crowd=0.5, tiny=0.5))
        outside = np.ones(drawn.shape[:2], bool)
        for box in boxes:
            outside[box.y : box.y + box.height, box.x : box.x + box.width] = False
        assert np.array_equal(drawn[outside], bare[outside])


def test_boxes_lie_in_the_picture_and_hide_little_of_one_another():
    for number in range(40):
        pixels, boxes = paint(plan(number, boxes=12))
        height, width = pixels.shape[:2]
        assert boxes
        assert SIDES[0] <= min(height, width) <= max(height, width) <= SIDES[1]
        covered = np.zeros((height, width), np.int64)
        for box in boxes:
            assert min(box.x, box.y) >= 0
            assert box.x + box.width <= width
            assert box.y + box.height <= height
            covered[box.y : box.y + box.height, box.x : box.x + box.width] += 1
        assert (covered > 1).sum() <= 0.3 * (covered > 0).sum()


def test_a_picture_is_decided_by_seed_and_number():
    assert draw(pickle.loads(pickle.dumps(plan(3)))) == draw(plan(3))
    others = [draw(plan(number)).jpeg for number in range(5)] + [draw(plan(3, seed=6)).jpeg]
    assert len(set(others)) == 6


def test_the_file_is_the_picture_that_was_painted():
    drawn = draw(plan(1))
    with Image.open(io.BytesIO(drawn.jpeg)) as picture:
        assert (picture.format, picture.size) == ("JPEG", (drawn.width, drawn.height))
        decoded = np.asarray(picture.convert("RGB")).astype(np.float64)
    painted, boxes = paint(plan(1))
    assert tuple(boxes) == drawn.boxes
    assert np.abs(decoded - painted).mean() < 12


def test_special_forms_have_the_boxes_of_their_name():
    assert draw(plan(form="empty")).boxes == ()
    [tiny] = draw(plan(form="one tiny")).boxes
    assert (tiny.width, tiny.height) == (2, 2)
    for sides in ((40, 40), (40, 400), (600, 700)):
        many = draw(plan(form="many", sides=sides))
        assert len(many.boxes) == MANY > 300
        assert min(min(box.width, box.height) for box in many.boxes) >= 1
        painted = np.zeros((many.height, many.width), np.int64)
        for box in many.boxes:
            painted[box.y : box.y + box.height, box.x : box.x + box.width] += 1
        assert painted.max() == 1


def test_crowds_are_one_box_around_their_members():
    crowds = [box for number in range(20) for box in draw(plan(number, boxes=1, crowd=1.0)).boxes if box.crowd]
    assert len(crowds) > 10
    assert not [box for number in range(5) for box in draw(plan(number, crowd=0.0)).boxes if box.crowd]


def test_a_crowd_says_which_members_it_has():
    [box] = draw(plan(form="crowd")).boxes
    assert box.crowd
    assert len(box.members) >= 6
    left, top = min(one.x for one in box.members), min(one.y for one in box.members)
    right, bottom = max(one.x + one.width for one in box.members), max(one.y + one.height for one in box.members)
    assert (left, top, right, bottom) == (box.x, box.y, box.x + box.width, box.y + box.height)
    assert {one.class_index for one in box.members} == {box.class_index}


def test_a_picture_has_the_size_that_is_asked_for():
    drawn = draw(plan(size=(150, 45)))
    assert (drawn.width, drawn.height) == (150, 45)
    with Image.open(io.BytesIO(drawn.jpeg)) as picture:
        assert picture.size == (150, 45)


def test_pictures_larger_than_the_table_of_noise_repeat_it():
    drawn = draw(plan(sides=(1600, 1600), boxes=1))
    assert (drawn.width, drawn.height) == (1600, 1600)


@pytest.mark.parametrize(
    "changes", [{"sides": (30, 90)}, {"sides": (90, 80)}, {"boxes": 0}, {"classes": ()}, {"size": (90, 30)}]
)
def test_impossible_plans_are_refused(changes):
    with pytest.raises(ConfigError, match=r"sides of|boxes of|sides from"):
        plan(**changes)


PARTS = {"saltire": 2, "ring": 3, "frame": 4}


@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=SHAPES)
def test_outlines_follow_the_drawn_pixels(shape):
    for height, width, least in ((24, 30, 0.85), (61, 44, 0.9), (200, 300, 0.96)):
        parts = outlines(shape, height, width)
        assert len(parts) == PARTS.get(SHAPES[shape], 1)
        corners = np.concatenate(parts)
        np.testing.assert_allclose([corners.min(0), corners.max(0)], [[0, 0], [width, height]], atol=1e-9)
        rles = coco_mask.frPyObjects([part.reshape(-1).tolist() for part in parts], height, width)
        found, drawn = coco_mask.decode(coco_mask.merge(rles)).astype(bool), shape_of(shape, height, width)
        assert (found & drawn).sum() / (found | drawn).sum() > least, (height, width)


def test_small_objects_are_rectangles():
    for shape in range(len(SHAPES)):
        [part] = outlines(shape, 2, 5)
        assert part.tolist() == [[0, 0], [5, 0], [5, 2], [0, 2]]


def test_run_lengths_are_pycocotools():
    random = np.random.default_rng(4)
    for inside in (random.random((7, 5)) < 0.4, np.ones((3, 2), bool), np.zeros((3, 2), bool)):
        runs = {"size": list(inside.shape), "counts": run_lengths(inside)}
        decoded = coco_mask.decode(coco_mask.frPyObjects(runs, *inside.shape))
        assert np.array_equal(decoded.astype(bool), inside)
        assert sum(runs["counts"]) == inside.size
