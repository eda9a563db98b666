# mypy: allow-untyped-defs
"""Overlaps of boxes in Triton kernels. Results are bit-identical to those of :mod:`common.ops.boxes`.

Matching and suppression depend on whether an overlap exactly equals another overlap or a threshold. So launch kernels
that call these functions with ``enable_fp_fusion=False``: a fused multiply-add does not round the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ALL: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def load_corners(boxes_ptr, row, mask):
    """Return x1, y1, x2, y2 in fp32 for the given rows of (rows, 4) boxes, 0 where the mask is false."""
    corner_ptr = boxes_ptr + row * 4
    x1 = tl.load(corner_ptr, mask=mask, other=0.0).to(tl.float32)
    y1 = tl.load(corner_ptr + 1, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(corner_ptr + 2, mask=mask, other=0.0).to(tl.float32)
    y2 = tl.load(corner_ptr + 3, mask=mask, other=0.0).to(tl.float32)
    return x1, y1, x2, y2


@triton.jit
def side(start, end, PIXEL: tl.constexpr):
    """Return the length from ``start`` to ``end``. PIXEL is ``pixel`` of :mod:`common.ops.boxes`."""
    length = end - start
    if PIXEL != 0:
        length += PIXEL
    return length


@triton.jit
def intersection_over_union(x1, y1, x2, y2, other_x1, other_y1, other_x2, other_y2, PIXEL: tl.constexpr):
    """Return the overlaps of boxes whose corners broadcast; 0 where the intersection has no area."""
    left, right = tl.maximum(x1, other_x1, propagate_nan=_ALL), tl.minimum(x2, other_x2, propagate_nan=_ALL)
    top, bottom = tl.maximum(y1, other_y1, propagate_nan=_ALL), tl.minimum(y2, other_y2, propagate_nan=_ALL)
    width, height = side(left, right, PIXEL), side(top, bottom, PIXEL)
    both = tl.maximum(width, 0.0, propagate_nan=_ALL) * tl.maximum(height, 0.0, propagate_nan=_ALL)
    area = side(x1, x2, PIXEL) * side(y1, y2, PIXEL)
    other_area = side(other_x1, other_x2, PIXEL) * side(other_y1, other_y2, PIXEL)
    union = area + other_area - both
    some = both > 0
    return tl.where(some, tl.div_rn(both, tl.where(some, union, 1.0)), 0.0)
