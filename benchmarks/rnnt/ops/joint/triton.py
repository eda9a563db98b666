# mypy: allow-untyped-defs
"""Triton kernels of the packed joint network's hidden layer.

A program has some frames of an utterance and loops over the token positions, with f in registers and g in caches.
Forward writes 2 H bytes per row, and backward reads them. For 192 utterances of real lengths (2.45 million rows of
512 in 16 bit), this is 2.5 GB each, 0.6 ms at 4.3 TB/s on an H200. Forward also computes a hash per two elements, 0.6
billion of about 14 operations: the same time again if it does not overlap.

Backward sums f's gradient over u in registers. For g's gradient, every program writes the sum over its frames, and a
second kernel adds these in the order of the frames, without atomics.

Unused rows are neither written nor read. Shapes: S frames, N token positions, B utterances, H width, R rows, P rows
of partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.rnnt.ops.joint import JointPasses, check
from benchmarks.rnnt.packed_rows import PackedRows
from common.ops.dropout.reference import DropoutMask
from common.ops.dropout.triton import keep_of_rows, mask_keys, rate
from common.ops.tile import Tile


@triton.jit
def _utterance(frames_ptr, tokens_ptr, offsets_ptr, utterance):
    """Return the utterance's frames, token positions and first row."""
    frames = tl.load(frames_ptr + utterance)
    columns = tl.load(tokens_ptr + utterance) + 1
    return frames, columns, tl.load(offsets_ptr + utterance)


@triton.jit
def _first_sums(first_row, utterance, N, BLOCK_S: tl.constexpr):
    """Return the first partial sum of an utterance, after the maximum number of those of earlier utterances."""
    return first_row // BLOCK_S + utterance.to(tl.int64) * (N + 1)


@triton.jit(do_not_specialize=["site"])
def joint_forward_kernel(
    f_ptr,  # (S, B, H)
    g_ptr,  # (N, B, H)
    h_ptr,  # (R, H)
    frames_ptr, tokens_ptr,  # (B,) int32
    offsets_ptr,  # (B + 1,) int64
    seed_ptr,  # 0-d int64
    site, B,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
):  # fmt: skip
    """Write the hidden layer. Grid (ceil(S / BLOCK_S), B)."""
    utterance = tl.program_id(1)
    frames, columns, first_row = _utterance(frames_ptr, tokens_ptr, offsets_ptr, utterance)
    frame = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    if tl.program_id(0) * BLOCK_S >= frames:
        return
    first, second = mask_keys(seed_ptr, site)
    element = tl.arange(0, BLOCK_H)
    inside = element < H
    mask = (frame < frames)[:, None] & inside[None, :]
    own = frame.to(tl.int64) * B + utterance
    f = tl.load(f_ptr + own[:, None] * H + element[None, :], mask=mask, other=0.0).to(tl.float32)
    row = first_row + frame.to(tl.int64) * columns
    g_ptrs = g_ptr + utterance.to(tl.int64) * H + element
    for token in range(columns):
        g = tl.load(g_ptrs, mask=inside, other=0.0).to(tl.float32)
        g_ptrs += B * H
        h = f + g[None, :]
        h = tl.where(h < 0, 0.0, h)  # keeps NaN
        begin = (row + token) * H
        if THRESHOLD:
            keep = keep_of_rows(begin.to(tl.uint32), BLOCK_H, H % 2 == 0, first, second, THRESHOLD)
            h = tl.where(keep, h * INVERSE_KEEP, 0.0)
        tl.store(h_ptr + begin[:, None] + element[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def joint_backward_kernel(
    dh_ptr,  # (R, H)
    live_ptr,  # (R,) bool
    df_ptr,  # (S, B, H)
    partial_ptr,  # (P, H) fp32
    frames_ptr, tokens_ptr,  # (B,) int32
    offsets_ptr,  # (B + 1,) int64
    S, N, B,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, INVERSE_KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of f, and partial sums of that of g. Grid (ceil(S / BLOCK_S), B)."""
    utterance = tl.program_id(1)
    frames, columns, first_row = _utterance(frames_ptr, tokens_ptr, offsets_ptr, utterance)
    columns = tl.where(tl.program_id(0) * BLOCK_S < frames, columns, 0)
    frame = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    element = tl.arange(0, BLOCK_H)
    inside = element < H
    mask = (frame < frames)[:, None] & inside[None, :]
    row = first_row + frame.to(tl.int64) * columns
    sums = _first_sums(first_row, utterance, N, BLOCK_S) + tl.program_id(0) * columns
    total = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    for token in tl.range(0, columns, num_stages=STAGES):
        offset = (row + token)[:, None] * H + element[None, :]
        live = tl.load(live_ptr + row + token, mask=frame < frames, other=0) != 0
        dz = tl.load(dh_ptr + offset, mask=mask & live[:, None], other=0.0).to(tl.float32)
        total += dz
        tl.store(partial_ptr + (sums + token) * H + element, tl.sum(dz, 0), mask=inside)
    own = frame.to(tl.int64) * B + utterance
    tl.store(
        df_ptr + own[:, None] * H + element[None, :], (total * INVERSE_KEEP).to(df_ptr.dtype.element_ty),
        mask=(frame < S)[:, None] & inside[None, :],
    )  # fmt: skip


@triton.jit
def joint_columns_kernel(
    partial_ptr,  # (P, H) fp32
    dg_ptr,  # (N, B, H)
    frames_ptr, tokens_ptr,  # (B,) int32
    offsets_ptr,  # (B + 1,) int64
    N, B,
    H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of all frames to the gradient of g. Grid (N, B)."""
    token, utterance = tl.program_id(0), tl.program_id(1)
    frames, columns, first_row = _utterance(frames_ptr, tokens_ptr, offsets_ptr, utterance)
    shares = tl.where(token < columns, tl.cdiv(frames, BLOCK_S), 0)
    element = tl.arange(0, BLOCK_H)
    inside = element < H
    sums = _first_sums(first_row, utterance, N, BLOCK_S) + token
    total = tl.zeros((TOGETHER, BLOCK_H), tl.float32)
    for first in range(0, shares, TOGETHER):
        share = first + tl.arange(0, TOGETHER)
        offset = (sums + share.to(tl.int64) * columns) * H
        mask = (share < shares)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + offset[:, None] + element[None, :], mask=mask, other=0.0)
    dg = (tl.sum(total, 0) * INVERSE_KEEP).to(dg_ptr.dtype.element_ty)
    tl.store(dg_ptr + (token.to(tl.int64) * B + utterance) * H + element, dg, mask=inside)


TILES: dict[str, Tile] = {
    "forward": Tile(frames=4, warps=2),
    "backward": Tile(frames=16, warps=2, stages=1),
    "columns": Tile(partial_sums=4, warps=4),
}
"""Tile of each pass.

- ``frames``: frames of one utterance per program. In backward, more frames give fewer partial sums;
- ``warps`` of ``backward``: with at most as many threads as elements in a row, a thread sums the same elements of all
  rows, without exchange between threads;
- ``partial_sums``: partial sums in flight."""


def forward(f_SBH: Tensor, g_NBH: Tensor, rows: PackedRows, dropout: DropoutMask) -> Tensor:
    """Return the hidden layer ``dropout(relu(f + g))``, (capacity, H).

    See :func:`benchmarks.rnnt.ops.joint.forward_reference`. Unused rows stay uninitialised.
    """
    check(f_SBH, g_NBH, rows)
    frames, utterances, width = f_SBH.shape
    h_RH = f_SBH.new_empty(rows.capacity, width)
    tile = TILES["forward"]
    if h_RH.numel():
        joint_forward_kernel[(triton.cdiv(frames, tile.frames), utterances)](
            f_SBH.contiguous(), g_NBH.contiguous(), h_RH, *rows[:3], dropout.seed, dropout.site, utterances,
            H=width, BLOCK_H=_block(width), BLOCK_S=tile.frames, **rate(dropout.p)._asdict(), num_warps=tile.warps,
        )  # fmt: skip
    return h_RH


def backward(
    dh_RH: Tensor,
    live_R: Tensor,
    frames: int,
    columns: int,
    rows: PackedRows,
    dropout: DropoutMask,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of f, (S, B, H), and g, (N, B, H).

    See :func:`benchmarks.rnnt.ops.joint.backward_reference`.
    """
    utterances, width = rows.utterances, dh_RH.shape[1]
    df_SBH, dg_NBH = dh_RH.new_empty(frames, utterances, width), dh_RH.new_empty(columns, utterances, width)
    tile = TILES["backward"]
    partial_PH = dh_RH.new_empty(
        (rows.capacity // tile.frames + utterances * (columns + 1) + 1, width), dtype=torch.float32
    )
    shared = {
        "H": width, "BLOCK_H": _block(width), "BLOCK_S": tile.frames, "INVERSE_KEEP": rate(dropout.p).INVERSE_KEEP,
    }  # fmt: skip
    if width and utterances:
        dh_RH = dh_RH.contiguous()
        joint_backward_kernel[(triton.cdiv(frames, tile.frames), utterances)](
            dh_RH, live_R, df_SBH, partial_PH, *rows[:3], frames, columns, utterances,
            STAGES=tile.stages, num_warps=tile.warps, **shared,
        )  # fmt: skip
        sums = TILES["columns"]
        joint_columns_kernel[(columns, utterances)](
            partial_PH, dg_NBH, *rows[:3], columns, utterances,
            TOGETHER=sums.partial_sums, num_warps=sums.warps, **shared,
        )  # fmt: skip
    return df_SBH, dg_NBH


def _block(width: int) -> int:
    return max(triton.next_power_of_2(width), 2)


PASSES = JointPasses(forward, backward)
