"""RoIAlign of a pyramid by torchvision, region by region in float64, and made-up pyramids with regions of every kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torchvision
from torch import Tensor

STRIDES = (4, 8, 16, 32)
ABSENT = 3
"""Last regions of every picture, in whose slots there is none; their boxes are not numbers."""


def expected(
    levels: Sequence[Tensor], boxes: Tensor, there: Tensor, strides: Sequence[int], bins: int, samples: int
) -> Tensor:
    """(B R, C, S, S) in float64, differentiable."""
    rows = []
    for picture in range(len(boxes)):
        for box, exists in zip(boxes[picture].double(), there[picture], strict=True):
            if not exists:
                rows.append(levels[0].new_zeros((1, levels[0].shape[1], bins, bins), dtype=torch.float64))
                continue
            x1, y1, x2, y2 = box.tolist()
            size = math.sqrt((x2 - x1 + 1) * (y2 - y1 + 1))
            level = min(max(math.floor(4 + math.log2(size / 224 + 1e-6)), 2), 5) - 2
            features = levels[level][picture : picture + 1].double()
            rows.append(
                torchvision.ops.roi_align(
                    features, [box[None]], bins, spatial_scale=1 / strides[level], sampling_ratio=samples, aligned=False
                )
            )
    return torch.cat(rows)


def regions(random: torch.Generator, pictures: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Boxes and whether they are there: anywhere, across the borders, at the seams of levels, outside, without size."""
    seams = []
    for size in (112.0, 224.0, 448.0):
        seams += [[-40.0, -30.0, size - 41, size - 31], [-40.0, -30.0, size - 41.1, size - 31]]
    special = [
        *seams,
        [3.0, 5.0, 3.0, 5.0],
        [0.0, 0.0, width - 1.0, height - 1.0],
        [-300.0, -300.0, -250.0, -250.0],
        [width + 300.0, 10.0, width + 320.0, 40.0],
        [width - 2.0, height - 3.0, width + 9.0, height + 8.0],
        [20.0, 20.0, 11.0, 8.0],
        [1.3, 2.7, 6.1, height + 0.5],
        [float(width), float(height), width + 0.5, height + 0.5],
    ]
    corner = torch.rand((pictures, 12, 2), generator=random) * torch.tensor([width, height])
    size = torch.rand((pictures, 12, 2), generator=random) ** 2 * 150
    boxes = torch.cat([corner - 20, corner - 20 + size], 2)
    boxes = torch.cat([boxes, torch.tensor(special).expand(pictures, -1, -1)], 1)
    boxes = torch.cat([boxes, boxes.new_full((pictures, ABSENT, 4), torch.nan)], 1)
    order = torch.rand(boxes.shape[:2], generator=random).argsort(1)
    boxes = boxes.gather(1, order.unsqueeze(2).expand_as(boxes))
    return boxes, ~boxes.isnan().any(2)


def pyramid(
    random: torch.Generator, pictures: int, channels: int, height: int, width: int, dtype: torch.dtype
) -> list[Tensor]:
    """Levels of pictures of this many px, channels_last."""
    return [
        torch.randn((pictures, -(-height // stride), -(-width // stride), channels), generator=random)
        .to(dtype)
        .permute(0, 3, 1, 2)
        for stride in STRIDES
    ]
