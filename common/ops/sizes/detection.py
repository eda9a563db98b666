"""Sizes of RetinaNet with a ResNeXt-50 trunk for the operations of detection: 32 pictures of 800 x 800 pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.ops.cases import Draw

PICTURES = 32
IMAGE_SIZE = 800
LEVELS = (100, 50, 25, 13, 7)
"""Height and width of each level of the feature pyramid, in cells."""

ANCHORS = 9
CLASSES = 264
MOST_BOXES = 1000
BOXES = 7
"""Average number of boxes per picture."""

CANDIDATES = 5 * 1000
"""Candidates per picture for suppression: 1,000 from each of the five levels."""

DETECTIONS = 300
OVERLAP = 0.5


def anchors(levels: Sequence[int], device: torch.device) -> Tensor:
    """Return the corners (A, 4) of all anchors: level by level, row by row, three shapes in three sizes per cell."""
    found = []
    for cells in levels:
        stride = IMAGE_SIZE // cells
        position = torch.arange(cells, device=device) * stride
        corner = torch.stack(torch.meshgrid(position, position, indexing="xy"), -1).reshape(-1, 1, 2)
        size = 4 * stride * 2 ** (torch.arange(3, device=device) / 3)
        root = torch.tensor([0.5, 1.0, 2.0], device=device).sqrt().unsqueeze(1)
        half = torch.stack([size / root, size * root], -1).reshape(1, ANCHORS, 2) / 2
        found.append(torch.cat([corner - half, corner + half], 2).reshape(-1, 4))
    return torch.cat(found)


def boxes(draw: Draw, *shape: int, side: float) -> Tensor:
    """Return the corners of boxes at random positions, with sides of 1 to ``side`` + 1 pixels."""
    corner = draw.uniform(*shape, 2, high=IMAGE_SIZE)
    return torch.cat([corner, corner + draw.uniform(*shape, 2, low=1.0, high=1.0 + side)], -1)
