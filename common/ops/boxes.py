"""Areas and overlaps of boxes, which are corners x1, y1, x2, y2. Shapes: N and M boxes.

All arithmetic is in fp32, in fp64 of fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.triton_support import widen


def area(boxes_N4: Tensor) -> Tensor:
    """Areas, (..., N), of ``boxes_N4``, (..., N, 4)."""
    x1, y1, x2, y2 = widen(boxes_N4).unbind(-1)
    return (x2 - x1) * (y2 - y1)


def intersection_over_union(boxes_N4: Tensor, others_M4: Tensor) -> Tensor:
    """Of each with each: (..., N, M); 0 where both of a pair have no area.

    Args:
        boxes_N4: (..., N, 4).
        others_M4: (..., M, 4); leading dimensions broadcast.
    """
    boxes, others = widen(boxes_N4).unsqueeze(-2), widen(others_M4).unsqueeze(-3)
    width = (torch.minimum(boxes[..., 2], others[..., 2]) - torch.maximum(boxes[..., 0], others[..., 0])).clamp(min=0)
    height = (torch.minimum(boxes[..., 3], others[..., 3]) - torch.maximum(boxes[..., 1], others[..., 1])).clamp(min=0)
    both = width * height
    union = area(boxes) + area(others) - both
    return torch.where(both > 0, both / union, 0.0)
