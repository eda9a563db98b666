"""Sizes of pictures and shapes of batches, against the rules' words in exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.maskrcnn.pictures import PaddedShapes, orientation, resized_size, resized_sizes
from common.errors import DataError


def by_the_words(height, width, shorter, longest):
    """Shorter side to ``shorter``; where the longer one would exceed ``longest``, that side's share of it, rounded to
    the even number of two; the other side without its fraction."""
    short, long = min(height, width), max(height, width)
    size = shorter
    if Fraction(long, short) * shorter > longest:
        size = round(Fraction(longest * short, long))
    other = math.floor(Fraction(size * long, short))
    return (size, other) if height < width else (other, size)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((480, 640), (800, 1066)),
        ((640, 480), (1066, 800)),
        ((427, 640), (800, 1199)),
        ((640, 640), (800, 800)),
        ((384, 640), (800, 1333)),
        ((383, 640), (798, 1333)),
        ((96, 640), (200, 1333)),
        ((640, 59), (1334, 123)),  # 122.9 px become 123, which makes the longer side exceed the limit
    ],
)
def test_worked_sizes(size, expected):
    assert resized_size(*size, 800, 1333) == expected


def test_all_sizes_are_those_of_the_rules_words():
    sizes = np.random.default_rng(0).integers(40, 641, (400, 2))
    found = resized_sizes(sizes, 800, 1333)
    assert found.tolist() == [list(by_the_words(*size, 800, 1333)) for size in sizes.tolist()]


def test_squares_are_with_the_high_pictures():
    sizes = np.array([[480, 640], [640, 480], [500, 500]])
    assert orientation(sizes).tolist() == [0, 1, 1]


SHAPES = [(800, 1344), (1344, 800), (800, 1088)]
RESIZED = np.array([[800, 1066], [800, 1199], [1066, 800], [800, 800], [240, 1333]])


def test_a_batch_takes_the_smallest_shape_that_all_fit():
    shapes = PaddedShapes(SHAPES, RESIZED, str)
    shapes.require_common(np.array([0, 0, 1, 1, 0]))
    assert [shapes.of([index]) for index in range(5)] == [
        (800, 1088), (800, 1344), (1344, 800), (800, 1088), (800, 1344),
    ]  # fmt: skip
    assert shapes.of([0, 3]) == (800, 1088)
    assert shapes.of([0, 1]) == shapes.of([3, 4]) == (800, 1344)


def test_a_picture_that_fits_no_shape_is_named():
    with pytest.raises(
        DataError,
        match=r"^picture 2 is resized to a height of 1066 px and a width of 800 px, which fit none of "
        r"reader\.shapes=\[\[800, 1344\]\]: add a shape$",
    ):
        PaddedShapes(SHAPES[:1], RESIZED, lambda index: f"picture {index}")


def test_pictures_that_may_meet_need_a_shape_in_common():
    shapes = PaddedShapes(SHAPES, RESIZED, str)
    with pytest.raises(DataError, match="a batch of pictures can be 1066 px high and 1066 px wide, which fit none of"):
        shapes.require_common(np.array([0, 1, 0, 1, 1]))
