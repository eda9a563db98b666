"""Areas of boxes and their intersection over union. Boxes are corners x1, y1, x2, y2. Shapes: N and M boxes.

All arithmetic is in fp32, or in fp64 for fp64 inputs.

``pixel`` is added to the length of a side: 0 where corners are points, 1 where they are the first and the last pixel of
a box, as in Detectron and code derived from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.triton_support import widen


def side(start: Tensor, end: Tensor, pixel: float = 0.0) -> Tensor:
    """Return ``end - start + pixel``, the length of a side."""
    length = end - start
    return length + pixel if pixel else length


def area(boxes_N4: Tensor, pixel: float = 0.0) -> Tensor:
    """Return the areas (..., N) of boxes (..., N, 4), whose sides are ``pixel`` longer than the corners say."""
    x1, y1, x2, y2 = widen(boxes_N4).unbind(-1)
    return side(x1, x2, pixel) * side(y1, y2, pixel)


def intersection_over_union(boxes_N4: Tensor, others_M4: Tensor, pixel: float = 0.0) -> Tensor:
    """Return the intersections over union (..., N, M) of all pairs of boxes (..., N, 4) and (..., M, 4).

    Leading dimensions broadcast. The value is 0 where the intersection has no area.

    Args:
        pixel: added to each width and height: 1 if corners are inclusive pixels, 0 if they are points.
    """
    boxes, others = widen(boxes_N4).unsqueeze(-2), widen(others_M4).unsqueeze(-3)
    width, height = (
        side(
            torch.maximum(boxes[..., axis], others[..., axis]),
            torch.minimum(boxes[..., axis + 2], others[..., axis + 2]),
            pixel,
        ).clamp(min=0)
        for axis in (0, 1)
    )
    both = width * height
    union = area(boxes, pixel) + area(others, pixel) - both
    return torch.where(both > 0, both / union, 0.0)
