"""Mask R-CNN's anchors: one size per level of the pyramid, in several ratios (Lin et al., arXiv:1612.03144).

The first anchors of a level are computed for a cell of one stride and rounded to whole pixels; then they are enlarged.
This order is that of the published code of Faster R-CNN (Ren et al., arXiv:1506.01497) and of the reference. Corners
are legacy ones: a box from x1 to x2 has the width x2 - x1 + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Architecture

STRIDES = (4, 8, 16, 32, 64)
"""Distance between cells of each level in px, from the finest level."""


def level_sizes(size: Sequence[int]) -> list[tuple[int, int]]:
    """Return height and width of each level in cells, from the finest.

    Args:
        size: height and width of the padded picture, px.
    """
    height, width = size
    return [(-(-height // stride), -(-width // stride)) for stride in STRIDES]


def anchors(architecture: Architecture, size: Sequence[int]) -> list[Tensor]:
    """Return the anchors of a picture, in the order of the network's outputs.

    Args:
        size: height and width of the padded picture, px.

    Returns:
        For each level from the finest (A, 4) fp32 corners x1, y1, x2, y2 in px, by row, column and ratio, not clipped
        to the picture.
    """
    found = []
    for cells, stride, side in zip(level_sizes(size), STRIDES, architecture.anchor_sizes, strict=True):
        first_R4 = torch.tensor([_first_anchor(stride, side, ratio) for ratio in architecture.anchor_ratios])
        y, x = torch.meshgrid(*(torch.arange(count, dtype=torch.float32) * stride for count in cells), indexing="ij")
        found.append((torch.stack([x, y, x, y], -1)[:, :, None] + first_R4).flatten(0, 2))
    return found


def _first_anchor(stride: int, side: int, ratio: float) -> list[float]:
    """Return corners around the middle of the first cell. ``round`` rounds halves to even, as in the reference."""
    width = round(math.sqrt(stride * stride / ratio))
    height = round(width * ratio)
    middle = (stride - 1) / 2
    half_width, half_height = ((length * side / stride - 1) / 2 for length in (width, height))
    return [middle - half_width, middle - half_height, middle + half_width, middle + half_height]
