# mypy: allow-untyped-defs
"""Triton kernels that match anchors to the boxes of B pictures. Shapes: A anchors, capacity for M boxes.

A program owns a block of anchors of one picture and loops over the boxes of the picture without padding, so no table of
all overlaps exists. Rules with ``rescue`` need the largest overlap of each box first: a first kernel computes it with
an atomic maximum of integers, whose result does not depend on the order. Both kernels compute the overlaps, which is
cheaper than storing them: 120,087 anchors, 32 pictures and 7 boxes per picture give 27 million overlaps of about 30
instructions each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.anchor_matching import MatchingRule
from common.ops.box_kernels import intersection_over_union, load_corners
from common.ops.tile import Tile

BELOW: tl.constexpr = tl.constexpr(-1)
BETWEEN: tl.constexpr = tl.constexpr(-2)
_LARGEST: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _own_anchors(anchors_ptr, A, step, BLOCK: tl.constexpr):
    """Return the anchor indices of this program, a mask of the valid ones, and their corners.

    ``step`` is the number of rows from the anchors of one picture to those of the next; 0 if pictures share them.
    """
    anchor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = anchor < A
    x1, y1, x2, y2 = load_corners(anchors_ptr, tl.full((), step, tl.int64) * tl.program_id(1) + anchor, exists)
    return anchor, exists, x1, y1, x2, y2


@triton.jit
def _count(count_ptr, M):
    """Return the number of boxes in the picture of this program, and the row of its first box."""
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
    """Write, as one integer, the largest overlap of each box and the first anchor with it. Grid (ceil(A / BLOCK), B).

    The upper 32 bits are those of the overlap, a positive float. The lower 32 bits are the inverted index of the
    anchor, so that earlier anchors give larger integers. Boxes that no anchor overlaps keep 0.
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
    """Write the match of every anchor. Grid (ceil(A / BLOCK), B)."""
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
    offset = tl.full((), A, tl.int64) * tl.program_id(1) + anchor
    tl.store(matched_ptr + offset, judged.to(tl.int64), mask=exists)


TILES: dict[str, Tile] = {"best": Tile(anchors=256, warps=1), "match": Tile(anchors=512, warps=4)}
"""Tiles by pass. ``anchors``: anchors per program. ``best`` has one warp because it reduces over them for each box."""


def _launch(tile: Tile, anchors: int, pictures: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the constants of a pass."""
    block = min(tile.anchors, triton.next_power_of_2(anchors))
    return (triton.cdiv(anchors, block), pictures), {
        "BLOCK": block,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }


@torch.no_grad()
def match(anchors_A4: Tensor, boxes_BM4: Tensor, count_B: Tensor, rule: MatchingRule) -> Tensor:
    """Return for each anchor, (B, A) int64, the index of its box, or ``BELOW`` or ``BETWEEN``.

    See :func:`common.ops.anchor_matching.match_reference`. The result is the same.
    """
    anchors_A4, boxes_BM4 = anchors_A4.float().contiguous(), boxes_BM4.float().contiguous()
    anchors, (pictures, most) = anchors_A4.shape[-2], boxes_BM4.shape[:2]
    step = anchors if anchors_A4.dim() == 3 else 0
    matched_BA = torch.empty((pictures, anchors), dtype=torch.int64, device=boxes_BM4.device)
    if not matched_BA.numel():
        return matched_BA
    count_B = count_B.contiguous()
    best_BM = matched_BA.new_zeros((pictures, most if rule.rescue else 0))
    if best_BM.numel():
        grid, constants = _launch(TILES["best"], anchors, pictures)
        anchor_matching_best_kernel[grid](
            anchors_A4, boxes_BM4, count_B, best_BM, anchors, step, most, PIXEL=rule.pixel, **constants
        )
    grid, constants = _launch(TILES["match"], anchors, pictures)
    anchor_matching_kernel[grid](
        anchors_A4, boxes_BM4, count_B, best_BM, matched_BA, anchors, step, most, rule.low, rule.high, PIXEL=rule.pixel,
        EXCLUSIVE=rule.exclusive, EVERY_BEST=rule.rescue == "every_best", OWN_BEST=rule.rescue == "own_best",
        **constants,
    )  # fmt: skip
    return matched_BA
