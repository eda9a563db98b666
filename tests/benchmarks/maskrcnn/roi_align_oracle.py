"""RoIAlign of a pyramid by torchvision, region by region in float64, and made-up pyramids and regions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torchvision
from torch import Tensor

from benchmarks.maskrcnn.ops.roi_align.cases import special_boxes

STRIDES = (4, 8, 16, 32)
ANYWHERE = 12
"""Boxes in a picture in addition to the special boxes."""


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


def regions(random: torch.Generator, pictures: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Boxes and whether they are there: across the borders, at the seams of levels, outside, without size, anywhere.

    Boxes that are not there are not numbers. Pictures share out what is special.
    """
    special = [*special_boxes(STRIDES, height, width), [torch.nan] * 4, [torch.nan] * 4]
    corner = torch.rand((pictures, ANYWHERE, 2), generator=random) * torch.tensor([width, height]) * 0.9
    size = torch.rand((pictures, ANYWHERE, 2), generator=random) ** 2 * width
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
) -> list[Tensor]:
    """Levels of pictures of this many px, channels_last."""
    return [
        torch.randn((pictures, -(-height // stride), -(-width // stride), channels), generator=random)
        .to(dtype)
        .permute(0, 3, 1, 2)
        for stride in STRIDES
    ]
