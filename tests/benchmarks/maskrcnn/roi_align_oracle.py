"""RoIAlign of a pyramid by torchvision, region by region in float64, and made-up pyramids and regions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torchvision
from torch import Tensor

STRIDES = (4, 8, 16, 32)
FINER = (2, 4, 8, 16)
"""Strides at which small pictures have regions of all levels."""


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
            finest = math.log2(strides[0])
            level = int(min(max(math.floor(4 + math.log2(size / 224 + 1e-6)) - finest, 0), 3))
            features = levels[level][picture : picture + 1].double()
            rows.append(
                torchvision.ops.roi_align(
                    features, [box[None]], bins, spatial_scale=1 / strides[level], sampling_ratio=samples, aligned=False
                )
            )
    return torch.cat(rows)


def regions(
    random: torch.Generator,
    pictures: int,
    height: int,
    width: int,
    strides: Sequence[int] = STRIDES,
    anywhere: int = 12,
) -> tuple[Tensor, Tensor]:
    """Boxes and whether they are there: across the borders, at the seams of levels, outside, without size, anywhere.

    Boxes that are not there are not numbers. Pictures share out what is special.
    """
    special = []
    for stride in strides[1:]:
        side = 14.0 * stride - 1  # legacy: one less than the size
        special += [[-40.0, -30.0, side - 40, side - 30], [-40.0, -30.0, side - 40.1, side - 30]]
    special += [
        [3.0, 5.0, 3.0, 5.0],
        [0.0, 0.0, width - 1.0, height - 1.0],
        [-300.0, -300.0, -250.0, -250.0],
        [width + 300.0, 10.0, width + 320.0, 40.0],
        [width - 2.0, height - 3.0, width + 9.0, height + 8.0],
        [20.0, 20.0, 11.0, 8.0],
        [1.3, 2.7, 6.1, height + 0.5],
        [float(width), float(height), width + 0.5, height + 0.5],
        [torch.nan] * 4,
        [torch.nan] * 4,
    ]
    corner = torch.rand((pictures, anywhere, 2), generator=random) * torch.tensor([width, height]) * 0.9
    size = torch.rand((pictures, anywhere, 2), generator=random) ** 2 * width
    boxes = torch.cat([corner - 5, corner - 5 + size], 2)
    boxes = torch.cat([torch.tensor(special).view(-1, pictures, 4).transpose(0, 1), boxes], 1)
    order = torch.rand(boxes.shape[:2], generator=random).argsort(1)
    boxes = boxes.gather(1, order.unsqueeze(2).expand_as(boxes))
    return boxes, ~boxes.isnan().any(2)


def pyramid(
    random: torch.Generator,
    pictures: int,
    channels: int,
    height: int,
    width: int,
    dtype: torch.dtype,
    strides: Sequence[int] = STRIDES,
) -> list[Tensor]:
    """Levels of pictures of this many px, channels_last."""
    return [
        torch.randn((pictures, -(-height // stride), -(-width // stride), channels), generator=random)
        .to(dtype)
        .permute(0, 3, 1, 2)
        for stride in strides
    ]
