# mypy: allow-untyped-defs
"""Triton kernels of the packed joint network's hidden layer.

A program has some frames of an utterance and loops over the token positions, with f in registers and g in caches.
Forward writes 2 H bytes per row, and backward reads them. For 192 utterances of real lengths (2.45 million rows of
512 in 16 bit), this is 2.5 GB each, 0.6 ms at 4.3 TB/s on an H200. Forward also computes a hash per two elements, 0.6
billion of about 14 operations: the same time again if it does not overlap.

Backward sums f's gradient over u in registers. For g's gradient, every program writes the sum over its frames, and a
second kernel adds these in the order of the frames, without atomics.

Legend: S frames, N token positions, B utterances, H width, R rows, P rows of partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.dropout.kernels import keep_of_rows, mask_keys


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
        place = (row + token)[:, None] * H + element[None, :]
        live = tl.load(live_ptr + row + token, mask=frame < frames, other=0) != 0
        dz = tl.load(dh_ptr + place, mask=mask & live[:, None], other=0.0).to(tl.float32)
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
        place = (sums + share.to(tl.int64) * columns) * H
        mask = (share < shares)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + place[:, None] + element[None, :], mask=mask, other=0.0)
    dg = (tl.sum(total, 0) * INVERSE_KEEP).to(dg_ptr.dtype.element_ty)
    tl.store(dg_ptr + (token.to(tl.int64) * B + utterance) * H + element, dg, mask=inside)
