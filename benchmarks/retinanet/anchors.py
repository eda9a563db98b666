"""RetinaNet's anchors, as in the reference (Lin et al., arXiv:1708.02002, section 4).

Every cell of the five levels has nine anchors: three ratios, each in three sizes. Corners are rounded to whole pixels
around 0 and then shifted by (j, i) strides for the cell in row i and column j, without half a stride. The stride is
the picture's size divided by that of the level, rounded down: 8, 16, 32, 61 and 114 for 800 px.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIZES = tuple(tuple(int(base * 2 ** (third / 3)) for third in range(3)) for base in (32, 64, 128, 256, 512))
"""Square root of the anchors' areas in px, per level from the finest."""

RATIOS = (0.5, 1.0, 2.0)
"""Ratios of height to width."""

ANCHORS_PER_CELL = len(RATIOS) * 3
FINEST_HALVINGS = 3
"""How often the picture's size is halved for the finest level."""


def level_sizes(image_size: int) -> tuple[int, ...]:
    """Return the size (height and width) of each level in cells, from the finest.

    Args:
        image_size: height and width of the picture, px.
    """
    sizes = [image_size]
    for _ in range(FINEST_HALVINGS + len(SIZES) - 1):
        sizes.append((sizes[-1] + 1) // 2)
    return tuple(sizes[FINEST_HALVINGS:])


def anchors(image_size: int) -> Tensor:
    """Return all anchors of a picture, (A, 4) fp32, as corners x1, y1, x2, y2 in px, not clipped to the picture.

    The order is that of the network's outputs: level from the finest, row, column, ratio, size.

    Args:
        image_size: height and width of the picture, px.
    """
    levels = []
    for size, sides in zip(level_sizes(image_size), SIZES, strict=True):
        corners_A4 = torch.tensor([_first_anchor(side, ratio) for ratio in RATIOS for side in sides])
        start = torch.arange(size, dtype=torch.float32) * (image_size // size)
        y, x = torch.meshgrid(start, start, indexing="ij")
        levels.append((torch.stack([x, y, x, y], -1)[:, :, None] + corners_A4).flatten(0, 2))
    return torch.cat(levels)


def _first_anchor(side: int, ratio: float) -> list[float]:
    """Return corners around 0. Halves are rounded to even, as in PyTorch."""
    width, height = side / math.sqrt(ratio), side * math.sqrt(ratio)
    return [float(round(corner)) for corner in (-width / 2, -height / 2, width / 2, height / 2)]
