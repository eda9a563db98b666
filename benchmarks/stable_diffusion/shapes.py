"""Synthetic pictures: one coloured shape on a coloured background, as JPEG, with a caption that describes it."""

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
"""RGB values by colour name."""
SHAPES = ("circle", "square", "triangle")
QUALITY = 95
"""JPEG quality; chroma is not subsampled."""
_FINER = 4
"""Oversampling factor per direction for drawing a shape."""
_RADII = (0.24, 0.32)
"""Range of half the width of a shape, as a fraction of the shorter side of the picture."""
_SHIFT = 0.08
"""Largest shift of a shape from the centre per direction, as a fraction of the shorter side."""


@dataclass(frozen=True)
class ShapePlan:
    """Parameters of a picture.

    Attributes:
        seed, number: determine all random choices; each number gives another picture.
        sides: smallest and largest width and height, px, both included.
    """

    seed: int
    number: int
    sides: tuple[int, int]


@dataclass(frozen=True)
class DrawnShape:
    """A picture with its caption.

    Attributes:
        jpeg: content of the file.
        width, height: px.
    """

    jpeg: bytes
    caption: str
    width: int
    height: int


def draw(plan: ShapePlan) -> DrawnShape:
    """Draw the picture of ``plan``."""
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
    """Return (height, width): fraction of each pixel that the shape covers, within the central square."""
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
