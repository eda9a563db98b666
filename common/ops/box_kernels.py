# mypy: allow-untyped-defs
"""Overlaps of boxes in Triton kernels, with the bits of :mod:`common.ops.boxes`.

Whether an overlap equals another or a threshold decides what is matched and what is suppressed. So a kernel that calls
this is launched with ``enable_fp_fusion=False``: a product that is fused with the sum it goes into is not rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ALL: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def load_corners(boxes_ptr, row, mask):
    """x1, y1, x2, y2 of rows of (rows, 4) boxes, fp32; 0 where the mask is not set."""
    place = boxes_ptr + row * 4
    x1 = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    y1 = tl.load(place + 1, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(place + 2, mask=mask, other=0.0).to(tl.float32)
    y2 = tl.load(place + 3, mask=mask, other=0.0).to(tl.float32)
    return x1, y1, x2, y2


@triton.jit
def side(start, end, PIXEL: tl.constexpr):
    """Length from ``start`` to ``end``; PIXEL as in :mod:`common.ops.boxes`."""
    length = end - start
    if PIXEL != 0:
        length += PIXEL
    return length


@triton.jit
def intersection_over_union(x1, y1, x2, y2, other_x1, other_y1, other_x2, other_y2, PIXEL: tl.constexpr):
    """Of corners that broadcast; 0 where both of a pair have no area."""
    left, right = tl.maximum(x1, other_x1, propagate_nan=_ALL), tl.minimum(x2, other_x2, propagate_nan=_ALL)
    top, bottom = tl.maximum(y1, other_y1, propagate_nan=_ALL), tl.minimum(y2, other_y2, propagate_nan=_ALL)
    width, height = side(left, right, PIXEL), side(top, bottom, PIXEL)
    both = tl.maximum(width, 0.0, propagate_nan=_ALL) * tl.maximum(height, 0.0, propagate_nan=_ALL)
    area = side(x1, x2, PIXEL) * side(y1, y2, PIXEL)
    other_area = side(other_x1, other_x2, PIXEL) * side(other_y1, other_y2, PIXEL)
    union = area + other_area - both
    some = both > 0
    return tl.where(some, tl.div_rn(both, tl.where(some, union, 1.0)), 0.0)
