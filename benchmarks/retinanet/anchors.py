"""RetinaNet's anchors, as the reference makes them (Lin et al., arXiv:1708.02002, section 4).

Nine in every cell of five levels: three shapes in three sizes each. The corners of a level's first anchors are rounded
to whole pixels around 0; those of the cell in row i and column j are j and i strides further, and no half. The stride
is the picture's size divided by the level's and rounded down: 8, 16, 32, 61 and 114 for a picture of 800 px.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIZES = tuple(tuple(int(base * 2 ** (third / 3)) for third in range(3)) for base in (32, 64, 128, 256, 512))
"""Square roots of the areas of each level's anchors, px, from the finest level."""

RATIOS = (0.5, 1.0, 2.0)
"""Heights over widths."""

ANCHORS_PER_CELL = len(RATIOS) * 3
FINEST_HALVINGS = 3
"""Times that a picture is halved until it has the finest level's size."""


def level_sizes(image_size: int) -> tuple[int, ...]:
    """Height and width of each level in cells, from the finest.

    Args:
        image_size: height and width of the picture, px.
    """
    sizes = [image_size]
    for _ in range(FINEST_HALVINGS + len(SIZES) - 1):
        sizes.append((sizes[-1] + 1) // 2)
    return tuple(sizes[FINEST_HALVINGS:])


def anchors(image_size: int) -> Tensor:
    """All anchors of a picture, (A, 4) fp32, corners x1, y1, x2, y2 in px; not clipped to the picture.

    They are in the order of the network's outputs: by level from the finest, row, column, ratio, and size.

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
    """Corners around 0; halves are rounded to even, as PyTorch rounds."""
    width, height = side / math.sqrt(ratio), side * math.sqrt(ratio)
    return [float(round(corner)) for corner in (-width / 2, -height / 2, width / 2, height / 2)]
