"""Synthetic drawn pictures with known boxes, as JPEG, in place of the photographs of detection data sets.

A class is a shape, a colour and a filling; consecutive classes differ in shape and colour. Objects are drawn on a
noisy background of a muted colour, and each is mostly visible. A picture is a function of its plan.

The outline of an object consists of polygons. A saltire (an X) has two, which cross; a ring has three and a frame four,
which touch; other shapes have one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from common.errors import ConfigError
from common.formats.jpeg import encode

Form = Literal["plain", "many", "one tiny", "crowd", "empty"]

COLOURS: tuple[tuple[int, int, int], ...] = (
    (215, 15, 15),
    (10, 160, 30),
    (25, 50, 220),
    (220, 210, 10),
    (215, 20, 200),
    (10, 205, 215),
    (222, 222, 222),
    (220, 115, 0),
    (0, 0, 0),
    (110, 40, 160),
    (120, 220, 90),
)
"""RGB. The largest value plus the noise stays below 256."""
SHAPES = ("disc", "rectangle", "triangle", "cross", "ring", "diamond", "frame", "saltire")
FILLINGS = ("plain", "rows", "columns", "squares")
LOOKS = len(SHAPES) * len(COLOURS) * len(FILLINGS)
"""Number of distinct classes; a higher class looks like an earlier one."""

MANY = 310
"""Objects of a picture of the form ``many``: more than a detector keeps."""
TINY = 2
"""Side of a tiny object, px."""
LEAST_SIDE = 40
"""Side of the smallest picture, px: ``many`` objects fit."""
_RECOGNISABLE = 8
"""Smallest side of an object with its class's shape, px; smaller objects are rectangles."""
_GRAIN = 32
"""Levels of the noise: it adds 0 to 31."""
_TABLE = 1536
"""Side of the noise table, px; larger pictures repeat it."""
_GREY = (70, 130)
"""Range of the background's levels, before noise and slope."""
_SLOPE = 30
"""Largest rise of the background's level from left to right, and from top to bottom."""
_BANDS = 5
"""Number of bands of an object's filling; every second band is paler."""
_ATTEMPTS = 12
_HIDDEN = 0.15
"""Largest overlap of two boxes, as a fraction of the smaller one."""
_ARC = 24
"""Number of points of a whole circle."""
_HOLE = math.sqrt(0.3)
"""Radius of a ring's hole, relative to the ring's radius."""
_ARM = 0.3
"""Half the width of the arms of a cross; distance of a saltire's edges from the corners."""
_BAR = 0.55
"""Inner edge of a frame's bars; the outer edge is at 1."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class PicturePlan:
    """Plan of a picture.

    Attributes:
        seed, number: seed of all random choices; each number is another picture.
        classes: classes of the objects, equally likely.
        sides: smallest and largest width and height, px, both included.
        boxes: largest number of objects, at least 1. The number is uniform; fewer are drawn if they do not fit.
        crowd: probability of an additional cluster of small objects with one box around it.
        tiny: probability of an additional object of 2 px.
        form: ``plain``; ``many``: 310 small objects; ``one tiny``: only an object of 2 px; ``crowd``: only a cluster;
            ``empty``.
        size: width and height, px; None: random, within ``sides``.
    """

    seed: int
    number: int
    classes: tuple[int, ...]
    sides: tuple[int, int]
    boxes: int = 8
    crowd: float = 0.1
    tiny: float = 0.02
    form: Form = "plain"
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not LEAST_SIDE <= self.sides[0] <= self.sides[1]:
            raise ConfigError(f"sides of {self.sides[0]} to {self.sides[1]} px: ascending, from {LEAST_SIDE} px on")
        if self.size and min(self.size) < LEAST_SIDE:
            raise ConfigError(f"size={self.size}: sides from {LEAST_SIDE} px on")
        if self.boxes < 1 or not self.classes or min(self.classes) < 0:
            raise ConfigError(f"{self.boxes} boxes of {len(self.classes)} classes: at least 1 of each, counted from 0")


class DrawnBox(NamedTuple):
    """Box of an object or a crowd of one class, in px from the left and top; ``members`` are the boxes of a crowd."""

    class_index: int
    x: int
    y: int
    width: int
    height: int
    crowd: bool = False
    members: tuple[DrawnBox, ...] = ()


@dataclass(frozen=True)
class DrawnPicture:
    """An encoded picture, its size in px, and its boxes."""

    jpeg: bytes
    width: int
    height: int
    boxes: tuple[DrawnBox, ...]


def draw(plan: PicturePlan) -> DrawnPicture:
    """Draw and encode a picture."""
    pixels_HWC, boxes = paint(plan)
    jpeg = encode(Image.fromarray(pixels_HWC), 90)
    return DrawnPicture(jpeg, pixels_HWC.shape[1], pixels_HWC.shape[0], tuple(boxes))


def paint(plan: PicturePlan) -> tuple[NDArray[np.uint8], list[DrawnBox]]:
    """Return the pixels (H, W, 3) before encoding, and the boxes."""
    random = np.random.default_rng([plan.seed, plan.number])
    width, height = plan.size or (int(side) for side in random.integers(plan.sides[0], plan.sides[1] + 1, 2))
    pixels_HWC = _background(height, width, random)
    boxes: list[DrawnBox] = []
    if plan.form == "many":
        boxes = [DrawnBox(_one_of(plan.classes, random), *cell) for cell in _grid((0, 0, width, height), MANY, random)]
        for box in boxes:
            _put(pixels_HWC, box, random)
    elif plan.form == "one tiny":
        _place(pixels_HWC, _one_of(plan.classes, random), (TINY, TINY), boxes, random)
    elif plan.form == "crowd":
        _place_crowd(pixels_HWC, _one_of(plan.classes, random), boxes, random)
    elif plan.form == "plain":
        crowded = random.random() < plan.crowd
        for number in range(int(random.integers(1, plan.boxes + 1))):
            _place(pixels_HWC, _one_of(plan.classes, random), _size(width, height, random), boxes, random)
            if number == 0 and crowded:  # early, while there is space
                _place_crowd(pixels_HWC, _one_of(plan.classes, random), boxes, random)
        if random.random() < plan.tiny:
            _place(pixels_HWC, _one_of(plan.classes, random), (TINY, TINY), boxes, random)
    return pixels_HWC, boxes


def is_recognisable(height: int, width: int) -> bool:
    """Return whether an object of this size has the shape of its class; a smaller one is a rectangle."""
    return min(height, width) >= _RECOGNISABLE


def shape_of(class_index: int, height: int, width: int) -> NDArray[np.bool_]:
    """Return a mask (height, width) of an object's pixels; every outer row and column has some."""
    shape = SHAPES[class_index % len(SHAPES)]
    v = np.abs(np.arange(1 - height, height, 2, dtype=np.float32) / np.float32(height))[:, None]
    u = np.abs(np.arange(1 - width, width, 2, dtype=np.float32) / np.float32(width))[None, :]
    # coordinates of the point of each pixel that is nearest to the centre; from 0 at the centre to below 1
    b, a = np.maximum(v - np.float32(1 / height), 0), np.maximum(u - np.float32(1 / width), 0)
    whole: NDArray[np.bool_] = np.ones((height, width), np.bool_)
    if not is_recognisable(height, width) or shape == "rectangle":
        return whole
    if shape == "disc":
        return np.asarray(a * a + b * b <= 1)
    if shape == "triangle":
        below = np.arange(1, height + 1, dtype=np.float32)[:, None] / np.float32(height)
        return np.asarray(a <= below)
    if shape == "cross":
        return np.asarray((a <= 0.3) | (b <= 0.3))
    if shape == "ring":
        return np.asarray((a * a + b * b <= 1) & (u * u + v * v >= 0.3))
    if shape == "diamond":
        return np.asarray(a + b <= 1)
    if shape == "frame":
        return np.asarray(np.maximum(u, v) >= 0.55)
    return np.asarray(np.abs(u - v) <= 0.3)


def outlines(class_index: int, height: int, width: int) -> list[NDArray[np.float64]]:
    """Return the polygons of an object, (n, 2) each: x and y in px from the upper left corner of its box.

    Args:
        height, width: size of its box, px.
    """
    shape = SHAPES[class_index % len(SHAPES)] if is_recognisable(height, width) else "rectangle"
    scale = np.array([width, height]) / 2
    return [(np.array(part, np.float64) + 1) * scale for part in _parts(shape)]


def _parts(shape: str) -> list[Points]:
    """Return the polygons of a shape between -1 and 1."""
    if shape == "disc":
        return [_arc(0, 1, 1)[:-1]]
    if shape == "triangle":
        return [[(0, -1), (1, 1), (-1, 1)]]
    if shape == "cross":
        a = _ARM
        right, left = [(a, -a), (1, -a), (1, a), (a, a)], [(-a, a), (-1, a), (-1, -a), (-a, -a)]
        return [[(a, -1), *right, (a, 1), (-a, 1), *left, (-a, -1)]]
    if shape == "ring":
        ends = [(third / 3, (third + 1) / 3) for third in range(3)]
        return [[*_arc(*end, 1), *reversed(_arc(*end, _HOLE))] for end in ends]
    if shape == "diamond":
        return [[(0, -1), (1, 0), (0, 1), (-1, 0)]]
    if shape == "frame":
        across = [_rectangle(-1, -1, 1, -_BAR), _rectangle(-1, _BAR, 1, 1)]
        return [*across, _rectangle(-1, -_BAR, -_BAR, _BAR), _rectangle(_BAR, -_BAR, 1, _BAR)]
    if shape == "saltire":
        near = 1 - _ARM
        bar: Points = [(-1, -1), (-near, -1), (1, near), (1, 1), (near, 1), (-1, -near)]
        return [bar, [(-x, y) for x, y in bar]]
    return [_rectangle(-1, -1, 1, 1)]


def _arc(first: float, last: float, radius: float) -> Points:
    """Return points of a circle from ``first`` to ``last``, in fractions of a turn."""
    steps = round((last - first) * _ARC)
    turns = [2 * math.pi * (first + (last - first) * step / steps) for step in range(steps + 1)]
    return [(radius * math.cos(turn), radius * math.sin(turn)) for turn in turns]


def _rectangle(left: float, top: float, right: float, bottom: float) -> Points:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _one_of(classes: Sequence[int], random: np.random.Generator) -> int:
    return classes[int(random.integers(len(classes)))]


def _size(width: int, height: int, random: np.random.Generator) -> tuple[int, int]:
    """Return width and height of an object: 0.1 to 0.6 of the picture's shorter side, aspect ratio 0.6 to 1.7."""
    shorter = min(width, height)
    side = shorter * math.exp(random.uniform(math.log(0.1), math.log(0.6)))
    stretch = math.exp(random.uniform(-0.25, 0.25))
    across, down = (max(round(length), _RECOGNISABLE) for length in (side * stretch, side / stretch))
    return across, down


def _place(
    pixels_HWC: NDArray[np.uint8],
    class_index: int,
    size: tuple[int, int],
    boxes: list[DrawnBox],
    random: np.random.Generator,
) -> None:
    """Draw an object where it hides little of the others, and add its box; do nothing if no position was found."""
    if found := _free_place(pixels_HWC, size, boxes, random):
        boxes.append(DrawnBox(class_index, *found))
        _put(pixels_HWC, boxes[-1], random)


def _place_crowd(
    pixels_HWC: NDArray[np.uint8], class_index: int, boxes: list[DrawnBox], random: np.random.Generator
) -> None:
    """Draw a cluster of small objects, and add one box around them."""
    shorter = min(pixels_HWC.shape[:2])
    across, down = (int(side) for side in random.integers(shorter // 4, shorter // 2 + 1, 2))
    if found := _free_place(pixels_HWC, (across, down), boxes, random):
        members = [DrawnBox(class_index, *cell) for cell in _grid(found, int(random.integers(6, 13)), random)]
        for member in members:
            _put(pixels_HWC, member, random)
        left, top = min(box.x for box in members), min(box.y for box in members)
        right, bottom = max(box.x + box.width for box in members), max(box.y + box.height for box in members)
        boxes.append(DrawnBox(class_index, left, top, right - left, bottom - top, True, tuple(members)))


def _free_place(
    pixels_HWC: NDArray[np.uint8], size: tuple[int, int], boxes: list[DrawnBox], random: np.random.Generator
) -> tuple[int, int, int, int] | None:
    """Return left, top, width and height of a random box that overlaps others little; None if none was found."""
    height, width = pixels_HWC.shape[:2]
    for _ in range(_ATTEMPTS):
        x, y = int(random.integers(width - size[0] + 1)), int(random.integers(height - size[1] + 1))
        for box in boxes:
            across = min(x + size[0], box.x + box.width) - max(x, box.x)
            down = min(y + size[1], box.y + box.height) - max(y, box.y)
            smaller = min(size[0] * size[1], box.width * box.height)
            if across > 0 and down > 0 and across * down > _HIDDEN * smaller:
                break
        else:
            return (x, y, *size)
    return None


def _grid(
    region: tuple[int, int, int, int], count: int, random: np.random.Generator
) -> list[tuple[int, int, int, int]]:
    """Return ``count`` boxes in the cells of a grid over ``region``, both as left, top, width and height."""
    left, top, width, height = region
    columns = min(max(1, math.ceil(math.sqrt(count * width / height))), count)
    cell_width, cell_height = width // columns, height // math.ceil(count / columns)
    found = []
    for number in range(count):
        w, h = (int(random.integers(max(1, cell // 2), max(2, cell))) for cell in (cell_width, cell_height))
        x = left + number % columns * cell_width + int(random.integers(cell_width - w + 1))
        y = top + number // columns * cell_height + int(random.integers(cell_height - h + 1))
        found.append((x, y, w, h))
    return found


def _put(pixels_HWC: NDArray[np.uint8], box: DrawnBox, random: np.random.Generator) -> None:
    """Draw one object."""
    inside_HW = shape_of(box.class_index, box.height, box.width)
    colour = np.asarray(COLOURS[box.class_index % len(COLOURS)], np.float64) * random.uniform(0.85, 1)
    filling = box.class_index // (len(SHAPES) * len(COLOURS)) % len(FILLINGS)
    rows, columns = (np.arange(side) * _BANDS // side % 2 == 1 for side in (box.height, box.width))
    _fill(pixels_HWC, box, inside_HW, colour, random)
    if filling:
        bands_HW = (rows[:, None] & (filling & 1 > 0)) ^ (columns[None, :] & (filling & 2 > 0))
        _fill(pixels_HWC, box, inside_HW & bands_HW, 0.3 * colour + 0.7 * 112, random)


def _fill(
    pixels_HWC: NDArray[np.uint8],
    box: DrawnBox,
    mask_HW: NDArray[np.bool_],
    colour: NDArray[np.float64],
    random: np.random.Generator,
) -> None:
    """Set the pixels of the mask to the colour, with noise."""
    painted = _grain_of(box.height, box.width, random)
    painted += np.tile(colour.astype(np.uint8), box.width)
    region_HWC = pixels_HWC[box.y : box.y + box.height, box.x : box.x + box.width]
    np.copyto(region_HWC, painted.reshape(region_HWC.shape), where=mask_HW[:, :, None])


def _background(height: int, width: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return noise on a slope of a random muted colour, as pixels (H, W, 3)."""
    base, across, down = random.integers(*_GREY, 3), random.integers(_SLOPE), random.integers(_SLOPE)
    pixels = _grain_of(height, width, random)  # (H, 3 W): numpy is slow over rows of three values
    pixels += (base + np.linspace(0, across, width)[:, None]).astype(np.uint8).reshape(-1)
    pixels += np.linspace(0, down, height).astype(np.uint8)[:, None]
    return pixels.reshape(height, width, 3)


def _grain_of(height: int, width: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return noise (H, 3 W), cut from the table."""
    rows, columns = (-(-side // _TABLE) for side in (height, width))
    table = _grain() if rows == columns == 1 else np.tile(_grain(), (rows, columns))
    top, left = int(random.integers(len(table) - height + 1)), int(random.integers(table.shape[1] // 3 - width + 1))
    return table[top : top + height, 3 * left : 3 * (left + width)].copy()


@functools.cache
def _grain() -> NDArray[np.uint8]:
    """Return the noise table, (H, 3 W), uniform from 0."""
    return np.random.default_rng(0).integers(_GRAIN, size=(_TABLE, 3 * _TABLE), dtype=np.uint8)
