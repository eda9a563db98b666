"""Test boxes of objects against a flood fill, and the positions of crops against the reference's rule."""

from __future__ import annotations

from collections import Counter, deque
from itertools import product

import numpy as np
import pytest

from benchmarks.unet3d.crop import crop_origin, largest_boxes, on_object

DRAWS = 6000


def flooded(label: np.ndarray, number: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the boxes (start, stop on each axis) of the components of a class, by a flood fill."""
    left = {tuple(int(i) for i in voxel) for voxel in np.argwhere(label == number)}
    boxes = []
    for first in sorted(left):
        if first not in left:
            continue
        left.discard(first)
        component, queue = [], deque([first])
        while queue:
            voxel = queue.popleft()
            component.append(voxel)
            for axis, step in product(range(3), (-1, 1)):
                neighbour = tuple(c + step * (a == axis) for a, c in enumerate(voxel))
                if neighbour in left:
                    left.discard(neighbour)
                    queue.append(neighbour)
        boxes.append(tuple((min(axis), max(axis) + 1) for axis in zip(*component, strict=True)))
    return boxes


def volume(box: tuple[tuple[int, int], ...]) -> int:
    return int(np.prod([stop - start for start, stop in box]))


@pytest.mark.parametrize("density", [0.01, 0.05, 0.3])
def test_the_two_largest_boxes_of_each_class_equal_a_flood_fill(density):
    generator = np.random.default_rng(int(density * 100))
    label = generator.choice([0, 1, 2], size=(14, 11, 17), p=[1 - density, density / 2, density / 2]).astype(np.uint8)
    found = largest_boxes(label)
    assert sorted(found) == [1, 2]
    for number, boxes in found.items():
        every = flooded(label, number)
        given = [tuple((side.start, side.stop) for side in box) for box in boxes]
        assert len(set(given)) == len(given) == 2
        assert set(given) <= set(every)
        assert sorted(map(volume, given)) == sorted(map(volume, every))[-2:]


def test_an_object_at_the_end_of_a_volume_and_an_absent_class():
    label = np.zeros((5, 6, 7), np.uint8)
    label[3:, 4:, 5:] = 2
    assert largest_boxes(label) == {2: ((slice(3, 5), slice(4, 6), slice(5, 7)),)}


def test_a_volume_of_background_has_no_boxes():
    assert largest_boxes(np.zeros((3, 4, 5), np.uint8)) == {}


def reference_start(start: int, stop: int, whole: int, patch: int, drawn: int) -> int:
    """Return the reference's first voxel of a crop on one axis, for the random integer ``drawn``.

    Both ends are moved, then clamped; missing voxels are added at one end.
    """
    missing = patch - (stop - start)
    smaller = missing >= 0
    rest = abs(missing) - drawn
    low = start - drawn if smaller else start + drawn
    high = stop + rest if smaller else stop - rest
    low, high = max(low, 0), min(high, whole)
    short = patch - (high - low)
    if short > 0:
        if low == 0:
            high += short
        else:
            low -= short
    assert high - low == patch
    assert low >= 0
    assert high <= whole
    return low


def reference_starts(start: int, stop: int, whole: int, patch: int) -> Counter[int]:
    """Count the first voxels of the reference's crops over all possible random integers."""
    return Counter(reference_start(start, stop, whole, patch, n) for n in range(abs(patch - (stop - start))) or [0])


CASES = {
    "in the middle": (20, 26, 50, 16),
    "one voxel": (20, 21, 50, 16),
    "near the low border": (3, 8, 50, 16),
    "at the low border": (0, 8, 50, 16),
    "near the high border": (40, 47, 50, 16),
    "at the high border": (45, 50, 50, 16),
    "near both borders": (5, 10, 18, 16),
    "as large as the crop": (7, 23, 50, 16),
    "larger than the crop": (7, 40, 50, 16),
    "the whole volume": (0, 50, 50, 16),
    "a volume as large as the crop": (4, 9, 16, 16),
    "one voxel smaller": (10, 25, 50, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_crops_on_an_object_have_the_distribution_of_the_reference(case):
    start, stop, whole, patch = CASES[case]
    expected = reference_starts(start, stop, whole, patch)
    generator = np.random.default_rng(1)
    box = (slice(start, stop), slice(0, 3), slice(2, 5))
    found = Counter(on_object(generator, box, (whole, 9, 9), (patch, 9, 9))[0] for _ in range(DRAWS))
    assert set(found) == set(expected)
    for origin, count in expected.items():
        share = count / sum(expected.values())
        assert abs(found[origin] / DRAWS - share) < 5 * (share * (1 - share) / DRAWS) ** 0.5 + 1e-9


def test_axes_are_independent():
    generator = np.random.default_rng(2)
    sides = [CASES["larger than the crop"], CASES["near the low border"], CASES["at the high border"]]
    box = tuple(slice(start, stop) for start, stop, _, _ in sides)
    shape, size = tuple(side[2] for side in sides), tuple(side[3] for side in sides)
    found = {on_object(generator, box, shape, size) for _ in range(DRAWS)}
    assert found == set(product(*(reference_starts(*side) for side in sides)))


def nothing() -> dict:
    raise AssertionError("no crop is to be placed on an object")


def test_random_crops_never_start_at_the_last_position_unless_it_is_the_only_one():
    generator = np.random.default_rng(3)
    found = {crop_origin(generator, (13, 10, 11), (10, 10, 10), 0.0, nothing) for _ in range(DRAWS)}
    assert found == {(d, 0, 0) for d in range(3)}


def test_random_crops_are_uniform():
    generator = np.random.default_rng(4)
    found = Counter(crop_origin(generator, (13, 12, 10), (10, 10, 10), 0.0, nothing) for _ in range(DRAWS))
    assert len(found) == 6
    assert max(abs(count / DRAWS - 1 / 6) for count in found.values()) < 5 * (5 / 36 / DRAWS) ** 0.5


def at(*starts: int) -> tuple[slice, ...]:
    return tuple(slice(start, start + 4) for start in starts)


def test_classes_and_then_their_components_are_equally_likely():
    boxes = {1: (at(1, 1, 1), at(9, 9, 9)), 2: (at(5, 5, 5),)}  # as large as the crop: it lies on them exactly
    generator = np.random.default_rng(5)
    found = Counter(crop_origin(generator, (20, 20, 20), (4, 4, 4), 1.0, lambda: boxes) for _ in range(DRAWS))
    assert set(found) == {(1, 1, 1), (9, 9, 9), (5, 5, 5)}
    for origin, share in {(1, 1, 1): 0.25, (9, 9, 9): 0.25, (5, 5, 5): 0.5}.items():
        assert abs(found[origin] / DRAWS - share) < 5 * (share * (1 - share) / DRAWS) ** 0.5


def test_the_fraction_of_crops_on_objects_is_the_oversampling():
    asked = []
    generator = np.random.default_rng(6)
    for _ in range(DRAWS):
        crop_origin(generator, (9, 9, 9), (4, 4, 4), 0.4, lambda: asked.append(1) or {1: (at(0, 0, 0),)})
    assert abs(len(asked) / DRAWS - 0.4) < 5 * (0.24 / DRAWS) ** 0.5


def test_a_volume_without_objects_gets_random_crops():
    generator = np.random.default_rng(7)
    found = {crop_origin(generator, (7, 6, 5), (5, 5, 5), 1.0, dict) for _ in range(500)}
    assert found == {(0, 0, 0), (1, 0, 0)}
