"""Sizes of RetinaNet with a ResNeXt-50 trunk on pictures of 800 x 800, at which operations of detection are measured.

A batch is 32 pictures, whatever the number of packs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.bench import cases

PICTURES = 32
IMAGE_SIZE = 800
LEVELS = (100, 50, 25, 13, 7)
"""Places along a side of the pyramid's levels."""

ANCHORS = 9
CLASSES = 264
MOST_BOXES = 1000
BOXES = 7
"""Boxes of a picture on average."""

CANDIDATES = 5 * 1000
"""Of a picture, for suppression."""

DETECTIONS = 300
OVERLAP = 0.5


def anchors() -> Tensor:
    """Corners (A, 4): of each level places row by row, at each of these three shapes of three sizes."""
    found = []
    for places in LEVELS:
        stride = IMAGE_SIZE // places
        place = torch.arange(places, device=cases.DEVICE) * stride
        corner = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1).reshape(-1, 1, 2)
        size = 4 * stride * 2 ** (torch.arange(3, device=cases.DEVICE) / 3)
        root = torch.tensor([0.5, 1.0, 2.0], device=cases.DEVICE).sqrt().unsqueeze(1)
        half = torch.stack([size / root, size * root], -1).reshape(1, ANCHORS, 2) / 2
        found.append(torch.cat([corner - half, corner + half], 2).reshape(-1, 4))
    return torch.cat(found)


def boxes(*shape: int, side: float) -> Tensor:
    """Corners anywhere in the picture, of sides up to ``side``."""
    corner = torch.rand((*shape, 2), device=cases.DEVICE) * IMAGE_SIZE
    return torch.cat([corner, corner + 1 + side * torch.rand((*shape, 2), device=cases.DEVICE)], -1)
