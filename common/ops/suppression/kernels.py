# mypy: allow-untyped-defs
"""Triton kernel of non-maximum suppression, one program a picture.

A program walks over its candidates from the best on, BLOCK at a time, and ends when it has kept as many as may be. A
block is compared with all that were kept before it, whose places the program leaves in memory, and then with itself:
what a candidate suppresses depends on whether it was suppressed, so each pass over the block may change later
candidates, and the passes end with the first that changes none. That is what going through them one by one gives,
since a candidate depends on earlier ones only: after n passes the first n are right.

The work is BLOCK times those kept for every block, not the square of the candidates, and no mask of N x N bits exists:
at 5,000 candidates and 300 to keep at most 1.7 million overlaps of a picture.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.box_kernels import intersection_over_union, load_corners


@triton.jit
def _any(bits):
    """Over the first axis."""
    return tl.max(bits.to(tl.int32), 0)


@triton.jit
def _covers(boxes_ptr, class_ptr, rows, rows_exist, columns, columns_exist, threshold):
    """Which candidates in ``rows`` overlap which of their class in ``columns`` by more than the threshold."""
    x1, y1, x2, y2 = load_corners(boxes_ptr, rows, rows_exist)
    u1, v1, u2, v2 = load_corners(boxes_ptr, columns, columns_exist)
    overlap = intersection_over_union(
        x1[:, None], y1[:, None], x2[:, None], y2[:, None], u1[None, :], v1[None, :], u2[None, :], v2[None, :]
    )
    row_class = tl.load(class_ptr + rows, mask=rows_exist, other=0)
    column_class = tl.load(class_ptr + columns, mask=columns_exist, other=0)
    exist = rows_exist[:, None] & columns_exist[None, :]
    return (overlap > threshold) & (row_class[:, None] == column_class[None, :]) & exist


@triton.jit
def suppression_kernel(
    boxes_ptr,  # (B, N, 4)
    score_ptr,  # (B, N)
    class_ptr,  # (B, N)
    order_ptr,  # (B, N) int64, best first
    kept_ptr,  # (B, K) int64
    there_ptr,  # (B, K) bool
    N, K, threshold,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    picture = tl.program_id(0).to(tl.int64)
    boxes_ptr += picture * N * 4
    score_ptr += picture * N
    class_ptr += picture * N
    order_ptr += picture * N
    kept_ptr += picture * K
    there_ptr += picture * K
    slot = tl.arange(0, BLOCK)
    earlier = slot[:, None] < slot[None, :]
    found = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while (first < N) & (found < K):
        exists = first + slot < N
        candidate = tl.load(order_ptr + first + slot, mask=exists, other=0)
        exists &= tl.load(score_ptr + candidate, mask=exists, other=float("-inf")) != float("-inf")
        before = tl.where(exists, 0, 1)
        for start in range(0, found, BLOCK):
            known = start + slot < found
            better = tl.load(kept_ptr + start + slot, mask=known, other=0, volatile=True)
            before |= _any(_covers(boxes_ptr, class_ptr, better, known, candidate, exists, threshold))
        covers = _covers(boxes_ptr, class_ptr, candidate, exists, candidate, exists, threshold) & earlier
        out = before
        changed = tl.full((), 1, tl.int32)
        while changed > 0:
            after = before | _any(covers & (out == 0)[:, None])
            changed = tl.max(tl.where(after != out, 1, 0), 0)
            out = after
        stays = tl.where(out == 0, 1, 0)
        place = found + tl.cumsum(stays, 0) - 1
        written = (stays > 0) & (place < K)
        tl.store(kept_ptr + place, candidate, mask=written)
        tl.store(there_ptr + place, stays > 0, mask=written)
        tl.debug_barrier()  # what a warp has written is read by the others
        found += tl.sum(stays, 0)
        first += BLOCK
    for start in range(0, K, BLOCK):
        place = start + slot
        absent = (place >= found) & (place < K)
        tl.store(kept_ptr + place, tl.zeros((BLOCK,), tl.int64), mask=absent)
        tl.store(there_ptr + place, tl.zeros((BLOCK,), tl.int1), mask=absent)
