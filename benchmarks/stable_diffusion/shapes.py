"""Drawn pictures of one coloured shape on a coloured background, as JPEG, and captions that say what they show."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (30, 50, 220),
    "yellow": (235, 215, 30),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
}
"""RGB, by the words of captions."""
SHAPES = ("circle", "square", "triangle")
QUALITY = 95
"""Of the JPEG, whose colours have the resolution of its brightness."""
_FINER = 4
"""Pixels of the raster that a shape is drawn on, in each direction, for one of the picture's."""
_RADII = (0.24, 0.32)
"""Half the width of a shape, as a share of the picture's shorter side."""
_SHIFT = 0.08
"""Of a shape from the picture's middle, in each direction, at most."""


@dataclass(frozen=True)
class ShapePlan:
    """What to draw.

    Attributes:
        seed, number: decide everything random; each number is another picture.
        sides: least and largest width and height, px, both included.
    """

    seed: int
    number: int
    sides: tuple[int, int]


@dataclass(frozen=True)
class DrawnShape:
    """A picture.

    Attributes:
        jpeg: the file.
        caption: what it shows.
        width, height: px.
    """

    jpeg: bytes
    caption: str
    width: int
    height: int


def draw(plan: ShapePlan) -> DrawnShape:
    """The picture that follows from ``plan``."""
    random = np.random.default_rng([plan.seed, plan.number])
    width, height = (int(side) for side in random.integers(plan.sides[0], plan.sides[1] + 1, 2))
    inner, outer = random.choice(list(COLOURS), 2, replace=False)
    shape = SHAPES[random.integers(len(SHAPES))]
    share_HW1 = _coverage(shape, width, height, random)[:, :, None]
    pixels = share_HW1 * np.array(COLOURS[inner]) + (1 - share_HW1) * np.array(COLOURS[outer])
    content = io.BytesIO()
    picture = Image.fromarray(np.rint(pixels).astype(np.uint8))
    picture.save(content, "JPEG", quality=QUALITY, subsampling=0)
    return DrawnShape(content.getvalue(), f"a {inner} {shape} on a {outer} background", width, height)


def _coverage(shape: str, width: int, height: int, random: np.random.Generator) -> NDArray[np.float64]:
    """(height, width): the share of each pixel that the shape covers; it is in the middle square of the picture."""
    short = min(width, height)
    across, down = random.uniform(-_SHIFT, _SHIFT, 2) * short
    radius = random.uniform(*_RADII) * short
    x_1W = ((np.arange(width * _FINER) + 0.5) / _FINER - width / 2 - across)[None] / radius
    y_H1 = ((np.arange(height * _FINER) + 0.5) / _FINER - height / 2 - down)[:, None] / radius
    if shape == "circle":
        inside = x_1W**2 + y_H1**2 < 1
    elif shape == "square":
        inside = np.maximum(np.abs(x_1W), np.abs(y_H1)) < 0.9
    else:
        inside = (y_H1 < 0.9) & (2 * np.abs(x_1W) < y_H1 + 1.1)
    return inside.reshape(height, _FINER, width, _FINER).mean((1, 3))
