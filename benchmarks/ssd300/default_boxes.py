"""SSD's default boxes, in two orders.

Liu et al., arXiv:1512.02325, section 2.2, with the numbers of the MLPerf reference. A kind is one of the shapes in a
cell. The reference views a head's output (N, kinds * 4, H, W) as (N, 4, kinds * H * W); its order is therefore (level,
kind, cell). Our heads' outputs are in channels_last memory, with kinds before coordinates, so that the order is
(level, cell, kind) and nothing has to be moved. ``reference_rows`` maps one order to the other.

Shapes: A default boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.ssd300.config import Facts
from common.detection.coding import BoxCoding


def reference_boxes(facts: Facts) -> Tensor:
    """Return the default boxes in the reference's order: (A, 4) fp32 corners x1, y1, x2, y2 as fractions.

    Centres and sizes are clamped to 0 ... 1. Corners are not clamped and can be outside the picture.
    """
    rows = [
        (x, y, width, height)
        for level, cells in enumerate(facts.level_sizes)
        for width, height in _kinds(facts, level)
        for y, x in _centres(facts, level, cells)
    ]
    x_A, y_A, width_A, height_A = torch.tensor(rows, dtype=torch.float64).float().clamp(0, 1).unbind(1)
    return torch.stack(
        [x_A - 0.5 * width_A, y_A - 0.5 * height_A, x_A + 0.5 * width_A, y_A + 0.5 * height_A],
        1,
    )


def reference_rows(facts: Facts) -> Tensor:
    """Return (A,) int64: the row in the reference's order of each default box in the heads' order."""
    levels, first = [], 0
    for cells, kinds in zip(facts.level_sizes, facts.boxes_per_cell, strict=True):
        count = kinds * cells * cells
        levels.append(first + torch.arange(count).view(kinds, cells * cells).T.reshape(-1))
        first += count
    return torch.cat(levels)


def coding(facts: Facts) -> BoxCoding:
    """Return the coding of boxes relative to default boxes, without a limit for the size of decoded boxes."""
    centre, size = facts.deviations
    return BoxCoding((1 / centre, 1 / centre, 1 / size, 1 / size))


def _kinds(facts: Facts, level: int) -> Iterator[tuple[float, float]]:
    """Yield width and height of each kind of default box of a level."""
    size, next_size = (facts.box_sizes[level + step] / facts.image_size for step in (0, 1))
    yield size, size
    between = math.sqrt(size * next_size)
    yield between, between
    for ratio in facts.aspect_ratios[level]:
        longer, shorter = size * math.sqrt(ratio), size / math.sqrt(ratio)
        yield longer, shorter
        yield shorter, longer


def _centres(facts: Facts, level: int, cells: int) -> Iterator[tuple[float, float]]:
    """Yield y and x of each cell's centre, row by row."""
    across = facts.image_size / facts.steps[level]
    for row in range(cells):
        for column in range(cells):
            yield (row + 0.5) / across, (column + 0.5) / across
