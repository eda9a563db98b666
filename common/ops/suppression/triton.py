# mypy: allow-untyped-defs
"""Triton kernels of non-maximum suppression, with two algorithms.

Walking is for few kept of many candidates. One program per picture processes the candidates from the best on, BLOCK at
a time, and ends when it has kept K. It compares each block with all kept candidates, whose indices are in memory, and
then with itself. So the work is not quadratic in the candidates: with 5,000 candidates and 300 to keep, it is at most
1.7 million overlaps per picture, but they are sequential.

Masks are for many kept candidates. First, programs on the whole GPU compare all pairs and store one bit per pair, 32
bits per word. Then one program per picture processes 32 candidates at a time and reads only their words: the words of
the kept candidates, combined by OR, mark the later candidates that they suppress. With 2,000 candidates the bits of a
picture take 0.5 MB.

A candidate suppresses others only if it is not suppressed itself. So within a block, passes are repeated until one
changes nothing. This gives the same result as processing the candidates one by one: a candidate depends on earlier
ones only, so after n passes the first n are right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.box_kernels import intersection_over_union, load_corners
from common.ops.tile import Tile

WORD: tl.constexpr = tl.constexpr(32)
"""Candidates per word of bits."""


@triton.jit
def _any(bits):
    """Return whether any bit along the first axis is set, as int32."""
    return tl.max(bits.to(tl.int32), 0)


@triton.jit
def _candidates(order_ptr, score_ptr, position, N, SORTED: tl.constexpr):
    """Return the candidates at these positions of the order, and whether they exist."""
    exists = position < N
    if SORTED:
        candidate = position.to(tl.int64)
    else:
        candidate = tl.load(order_ptr + position, mask=exists, other=0)
    score = tl.load(score_ptr + candidate, mask=exists, other=float("-inf"))
    return candidate, exists & (score != float("-inf"))


@triton.jit
def _covers(
    boxes_ptr, class_ptr, rows, rows_exist, columns, columns_exist, threshold,
    CLASSES: tl.constexpr, PIXEL: tl.constexpr,
):  # fmt: skip
    """Return (rows, columns): whether the pair has one class and overlaps by more than the threshold."""
    x1, y1, x2, y2 = load_corners(boxes_ptr, rows, rows_exist)
    u1, v1, u2, v2 = load_corners(boxes_ptr, columns, columns_exist)
    overlap = intersection_over_union(
        x1[:, None], y1[:, None], x2[:, None], y2[:, None], u1[None, :], v1[None, :], u2[None, :], v2[None, :], PIXEL
    )
    covers = (overlap > threshold) & rows_exist[:, None] & columns_exist[None, :]
    if CLASSES:
        row_class = tl.load(class_ptr + rows, mask=rows_exist, other=0)
        column_class = tl.load(class_ptr + columns, mask=columns_exist, other=0)
        covers &= row_class[:, None] == column_class[None, :]
    return covers


@triton.jit
def _settled(before, covers):
    """Return which candidates are suppressed: those in ``before``, and those that a kept one of this block covers."""
    out = before
    changed = tl.full((), 1, tl.int32)
    while changed > 0:
        after = before | _any(covers & (out == 0)[:, None])
        changed = tl.max(tl.where(after != out, 1, 0), 0)
        out = after
    return out


@triton.jit
def _keep(kept_ptr, there_ptr, candidate, stays, found, K):
    """Append the candidates that stay to the ``found`` kept ones, and return the new number of kept ones."""
    position = found + tl.cumsum(stays, 0) - 1
    written = (stays > 0) & (position < K)
    tl.store(kept_ptr + position, candidate, mask=written)
    tl.store(there_ptr + position, stays > 0, mask=written)
    return found + tl.sum(stays, 0)


@triton.jit
def _leave_empty(kept_ptr, there_ptr, found, K, BLOCK: tl.constexpr):
    """Fill the result after its first ``found`` entries with 0 and False."""
    slot = tl.arange(0, BLOCK)
    for start in range(0, K, BLOCK):
        position = start + slot
        absent = (position >= found) & (position < K)
        tl.store(kept_ptr + position, tl.zeros((BLOCK,), tl.int64), mask=absent)
        tl.store(there_ptr + position, tl.zeros((BLOCK,), tl.int1), mask=absent)


@triton.jit
def suppression_kernel(
    boxes_ptr,  # (B, N, 4)
    score_ptr,  # (B, N)
    class_ptr,  # (B, N), read if CLASSES
    order_ptr,  # (B, N) int64, best first; read unless SORTED
    kept_ptr,  # (B, K) int64
    there_ptr,  # (B, K) bool
    N, K, threshold,
    CLASSES: tl.constexpr, SORTED: tl.constexpr, PIXEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the kept candidates, best first, then empty slots, by walking (see the module). Grid (B,)."""
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
        candidate, exists = _candidates(order_ptr, score_ptr, first + slot, N, SORTED)
        before = tl.where(exists, 0, 1)
        for start in range(0, found, BLOCK):
            known = start + slot < found
            better = tl.load(kept_ptr + start + slot, mask=known, other=0, volatile=True)
            before |= _any(_covers(boxes_ptr, class_ptr, better, known, candidate, exists, threshold, CLASSES, PIXEL))
        covers = _covers(boxes_ptr, class_ptr, candidate, exists, candidate, exists, threshold, CLASSES, PIXEL)
        stays = tl.where(_settled(before, covers & earlier) == 0, 1, 0)
        found = _keep(kept_ptr, there_ptr, candidate, stays, found, K)
        tl.debug_barrier()  # other warps read the kept candidates that a warp has written
        first += BLOCK
    _leave_empty(kept_ptr, there_ptr, found, K, BLOCK)


@triton.jit
def suppression_masks_kernel(
    boxes_ptr,  # (B, N, 4)
    score_ptr,  # (B, N)
    class_ptr,  # (B, N), read if CLASSES
    order_ptr,  # (B, N) int64, best first; read unless SORTED
    mask_ptr,  # (B, WORDS, N) int32
    N, words, threshold,
    CLASSES: tl.constexpr, SORTED: tl.constexpr, PIXEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the masks: bit c of word w at n says whether the n-th best candidate overlaps the (32 w + c)-th too much.

    Grid (ceil(N / ROWS), WORDS, B). A program writes nothing if in none of its pairs the better candidate is first, or
    if each pair lacks a candidate. Scores descend, so no candidate exists after an absent one.
    """
    picture = tl.program_id(2).to(tl.int64)
    boxes_ptr += picture * N * 4
    score_ptr += picture * N
    class_ptr += picture * N
    order_ptr += picture * N
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * WORD
    _, exist = _candidates(order_ptr, score_ptr, tl.maximum(first_row, first_column), N, SORTED)
    if (first_row < first_column + WORD) & exist:
        position, slot = first_row + tl.arange(0, ROWS), tl.arange(0, WORD)
        rows, rows_exist = _candidates(order_ptr, score_ptr, position, N, SORTED)
        columns, columns_exist = _candidates(order_ptr, score_ptr, first_column + slot, N, SORTED)
        covers = _covers(boxes_ptr, class_ptr, rows, rows_exist, columns, columns_exist, threshold, CLASSES, PIXEL)
        bits = tl.sum(covers.to(tl.int32) << slot[None, :], 1)
        tl.store(mask_ptr + (picture * words + tl.program_id(1)) * N + position, bits, mask=position < N)


@triton.jit
def suppression_by_masks_kernel(
    score_ptr,  # (B, N)
    order_ptr,  # (B, N) int64, best first; read unless SORTED
    mask_ptr,  # (B, WORDS, N) int32
    kept_ptr,  # (B, K) int64
    there_ptr,  # (B, K) bool
    N, K, words,
    SORTED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the kept candidates by the masks. WIDTH is the power of two that holds the words. Grid (B,)."""
    picture = tl.program_id(0).to(tl.int64)
    score_ptr += picture * N
    order_ptr += picture * N
    mask_ptr += picture * words * N
    kept_ptr += picture * K
    there_ptr += picture * K
    slot = tl.arange(0, WORD)
    word = tl.arange(0, WIDTH)
    earlier = slot[:, None] < slot[None, :]
    removed = tl.zeros((WIDTH,), tl.int32)
    found = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    more = tl.full((), 1, tl.int32)
    while (first < N) & (found < K) & (more > 0):
        position = first + slot
        candidate, exists = _candidates(order_ptr, score_ptr, position, N, SORTED)
        block = first // WORD
        own = tl.load(mask_ptr + block * N + position, mask=exists, other=0)
        follow = ((word > block) & (word < words))[:, None] & exists[None, :]
        rows = tl.load(mask_ptr + word.to(tl.int64)[:, None] * N + position[None, :], mask=follow, other=0)
        gone = tl.sum(tl.where(word == block, removed, 0), 0)
        before = tl.where(exists, (gone >> slot) & 1, 1)
        covers = (((own[:, None] >> slot[None, :]) & 1) > 0) & earlier
        stays = tl.where(_settled(before, covers) == 0, 1, 0)
        removed |= tl.reduce_or(tl.where(stays[None, :] > 0, rows, 0), 1)
        found = _keep(kept_ptr, there_ptr, candidate, stays, found, K)
        more = tl.max(exists.to(tl.int32), 0)
        first += WORD
    _leave_empty(kept_ptr, there_ptr, found, K, WORD)


TILES: dict[str, Tile] = {
    "suppress": Tile(candidates=64, warps=8),
    "masks": Tile(candidates=128, warps=4),
    "by_masks": Tile(candidates=32, warps=4),
}
"""Tile of each kernel. ``candidates``: candidates processed at a time; for ``by_masks`` always a word of 32."""

MASK_SHARE = 0.5
"""Masks are used if ``keep`` is at least this fraction of the candidates."""


@torch.no_grad()
def suppress(
    boxes_BN4: Tensor,
    score_BN: Tensor,
    class_BN: Tensor | None,
    threshold: float,
    keep: int,
    pixel: float = 0.0,
    presorted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return indices (B, K) of the kept candidates, best first, and whether each exists, (B, K) bool.

    See :func:`common.ops.suppression.suppress_reference`. The result is bit-identical.
    """
    pictures, candidates = score_BN.shape
    keep = min(keep, candidates)
    kept_BK = torch.empty((pictures, keep), dtype=torch.int64, device=score_BN.device)
    there_BK = torch.empty_like(kept_BK, dtype=torch.bool)
    if not kept_BK.numel():
        return kept_BK, there_BK
    boxes_BN4, score_BN = boxes_BN4.contiguous(), score_BN.contiguous()
    # kept_BK is a placeholder for tensors that the kernels do not read
    order_BN = kept_BK if presorted else score_BN.sort(dim=1, descending=True, stable=True).indices.contiguous()
    classes_BN = kept_BK if class_BN is None else class_BN.contiguous()
    if keep < MASK_SHARE * candidates:
        tile = TILES["suppress"]
        suppression_kernel[(pictures,)](
            boxes_BN4, score_BN, classes_BN, order_BN, kept_BK, there_BK, candidates, keep, threshold,
            CLASSES=class_BN is not None, SORTED=presorted, PIXEL=pixel, BLOCK=tile.candidates, num_warps=tile.warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return kept_BK, there_BK
    words = triton.cdiv(candidates, int(WORD.value))
    mask_BWN = torch.empty((pictures, words, candidates), dtype=torch.int32, device=score_BN.device)
    tile = TILES["masks"]
    suppression_masks_kernel[(triton.cdiv(candidates, tile.candidates), words, pictures)](
        boxes_BN4, score_BN, classes_BN, order_BN, mask_BWN, candidates, words, threshold,
        CLASSES=class_BN is not None, SORTED=presorted, PIXEL=pixel, ROWS=tile.candidates, num_warps=tile.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    suppression_by_masks_kernel[(pictures,)](
        score_BN, order_BN, mask_BWN, kept_BK, there_BK, candidates, keep, words,
        SORTED=presorted, WIDTH=triton.next_power_of_2(words), num_warps=TILES["by_masks"].warps,
    )  # fmt: skip
    return kept_BK, there_BK
