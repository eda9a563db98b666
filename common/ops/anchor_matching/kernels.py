# mypy: allow-untyped-defs
"""Triton kernels that match anchors to the boxes of B pictures.

A program owns some anchors of one picture and loops over the boxes that the picture really has, so that no table of
anchors and boxes exists. Boxes that are rescued need the largest overlap of each with any anchor first, which programs
agree on through an atomic maximum of integers: the order does not matter. Overlaps are computed in both passes, which
is cheaper than storing them: at 120,087 anchors, 32 pictures and 7 boxes in each there are 27 million, of some 30
instructions each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.box_kernels import intersection_over_union, load_corners

BELOW: tl.constexpr = tl.constexpr(-1)
BETWEEN: tl.constexpr = tl.constexpr(-2)
_LARGEST: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _own_anchors(anchors_ptr, A, step, BLOCK: tl.constexpr):
    """This program's anchors, which of them exist, and their corners; a picture's are ``step`` behind the last's."""
    anchor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = anchor < A
    x1, y1, x2, y2 = load_corners(anchors_ptr, tl.full((), step, tl.int64) * tl.program_id(1) + anchor, exists)
    return anchor, exists, x1, y1, x2, y2


@triton.jit
def _count(count_ptr, M):
    """Boxes of this program's picture, and the row of the first."""
    picture = tl.program_id(1)
    return tl.minimum(tl.load(count_ptr + picture).to(tl.int32), M), tl.full((), M, tl.int64) * picture


@triton.jit
def anchor_matching_best_kernel(
    anchors_ptr,  # (A, 4) fp32 and step 0, or (B, A, 4) and step A
    boxes_ptr,  # (B, M, 4) fp32
    count_ptr,  # (B,) integer
    best_ptr,  # (B, M) int64, zeros
    A, step, M,
    PIXEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest overlap of each box, and the first anchor that has it, as one number. Grid (A / BLOCK, B).

    The number is the bits of the overlap, a positive float, before the inverted bits of the anchor, which are larger
    the earlier it is. It stays 0 where no anchor overlaps the box.
    """
    anchor, _, x1, y1, x2, y2 = _own_anchors(anchors_ptr, A, step, BLOCK)
    count, start = _count(count_ptr, M)
    for box in range(count):
        left, top, right, bottom = load_corners(boxes_ptr, start + box, True)
        overlap = intersection_over_union(x1, y1, x2, y2, left, top, right, bottom, PIXEL)
        largest = tl.max(overlap, 0)
        if largest > 0:
            first = tl.min(tl.where(overlap == largest, anchor, _LARGEST), 0)
            bits = largest.to(tl.int32, bitcast=True).to(tl.int64)
            tl.atomic_max(best_ptr + start + box, (bits << 32) | (first ^ _LARGEST).to(tl.int64), sem="relaxed")


@triton.jit
def anchor_matching_kernel(
    anchors_ptr,  # (A, 4) fp32 and step 0, or (B, A, 4) and step A
    boxes_ptr,  # (B, M, 4) fp32
    count_ptr,  # (B,) integer
    best_ptr,  # (B, M) int64, read if boxes are rescued
    matched_ptr,  # (B, A) int64
    A, step, M, low, high,
    PIXEL: tl.constexpr, EXCLUSIVE: tl.constexpr, EVERY_BEST: tl.constexpr, OWN_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The match of every anchor. Grid (A / BLOCK, B)."""
    anchor, exists, x1, y1, x2, y2 = _own_anchors(anchors_ptr, A, step, BLOCK)
    count, start = _count(count_ptr, M)
    largest = tl.full((BLOCK,), -1.0, tl.float32)
    matched = tl.zeros((BLOCK,), tl.int32)
    rescued = tl.full((BLOCK,), BELOW, tl.int32)
    for box in range(count):
        left, top, right, bottom = load_corners(boxes_ptr, start + box, True)
        overlap = intersection_over_union(x1, y1, x2, y2, left, top, right, bottom, PIXEL)
        larger = overlap > largest
        largest = tl.where(larger, overlap, largest)
        matched = tl.where(larger, box, matched)
        if EVERY_BEST:
            best = (tl.load(best_ptr + start + box) >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            rescued = tl.where((overlap == best) & (overlap > 0), 0, rescued)
        if OWN_BEST:
            best = tl.load(best_ptr + start + box)
            first = (best & _LARGEST).to(tl.int32) ^ _LARGEST
            rescued = tl.where((anchor == first) & (best > 0), box, rescued)
    if EXCLUSIVE:
        enough, below = largest > high, largest <= low
    else:
        enough, below = largest >= high, largest < low
    judged = tl.where(enough, matched, tl.where(below, BELOW, BETWEEN))
    if EVERY_BEST:
        judged = tl.where(rescued >= 0, matched, judged)
    if OWN_BEST:
        judged = tl.where(rescued >= 0, rescued, judged)
    place = tl.full((), A, tl.int64) * tl.program_id(1) + anchor
    tl.store(matched_ptr + place, judged.to(tl.int64), mask=exists)
