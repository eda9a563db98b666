# mypy: allow-untyped-defs
"""The Triton kernel that puts the gradients of queries, keys and values together, head by head.

A program owns the D columns of one head's queries, keys or values, walks over tiles of tokens, adds them up element by
element, and their rows once, at its end: the bias gradient's partial sums, which
:mod:`common.ops.tiling.column_sums` adds in a fixed order. A tile is loaded once and stored in up to three forms: as it
is, in FP8, and in FP8 turned in shared memory, so that all are contiguous. The first use of a scale has no maximum of a
use before: every program then looks at a sample first.

On an H200 at 4,096 tokens and 24 heads of 128, 16 bit: to FP8 113 MB, 26 us at 4.3 TB/s, with the transpose 151 MB,
35 us; the sums alone 75 MB, 18 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.fp8_cast.device import finish, first_scale, no_peak, peak_of, round_to_fp8


@triton.jit
def _source(
    dq_ptr, dk_ptr, dv_ptr, block,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
):  # fmt: skip
    """Where a block of columns begins, and how far apart its tokens lie."""
    head, part = block // 3, block % 3
    pointer = dq_ptr
    if part == 1:
        pointer = dk_ptr
    if part == 2:
        pointer = dv_ptr
    stride_t = tl.where(part == 0, q_stride_t, tl.where(part == 1, k_stride_t, v_stride_t))
    stride_h = tl.where(part == 0, q_stride_h, tl.where(part == 1, k_stride_h, v_stride_h))
    return pointer + head * stride_h.to(tl.int64), stride_t


@triton.jit
def _load(pointer, stride_t, row, T, D: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """A tile, and which of its elements exist; with ``EVEN`` all do."""
    column = tl.arange(0, BLOCK_D)
    if EVEN:
        mask = tl.full((1, 1), True, tl.int1)
    else:
        mask = (row < T)[:, None] & (column < D)[None, :]
    return tl.load(pointer + row.to(tl.int64)[:, None] * stride_t + column[None, :], mask=mask, other=0.0), mask


@triton.jit
def qkv_gradient_kernel(
    dq_ptr, dk_ptr, dv_ptr,  # (T, H, D), D dense
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    d_qkv_ptr,  # (T, H, 3, D), written if HALF
    d_qkv8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # the same in e5m2 and its scale, if FP8
    transposed_ptr,  # (H, 3, D, T) in e5m2, written if TRANSPOSE
    partial_ptr,  # (programs, H, 3, D) fp32
    T,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr, TRANSPOSE: tl.constexpr,
    FROZEN: tl.constexpr, SAMPLED_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Grid (3 H * programs,); every program visits each programs-th tile of its columns."""
    N: tl.constexpr = 3 * H * D
    if FP8:
        known = tl.load(scale_ptr)
        scale = known
        peak = no_peak(BLOCK_T, BLOCK_D, GROUP)
        if known == 0.0:
            sampled = no_peak(BLOCK_T, BLOCK_D, GROUP)
            step = tl.cdiv(T, SAMPLED_ROWS)
            for first_row in range(0, SAMPLED_ROWS, BLOCK_T):
                sample = first_row + tl.arange(0, BLOCK_T)
                row = tl.where(sample < SAMPLED_ROWS, sample * step, T)
                for other in range(3 * H):
                    pointer, stride_t = _source(
                        dq_ptr, dk_ptr, dv_ptr, other,
                        q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
                    )  # fmt: skip
                    x, _ = _load(pointer, stride_t, row, T, D, BLOCK_D, False)
                    sampled = peak_of(sampled, x.to(tl.float32), BLOCK_T, BLOCK_D, GROUP)
            scale = first_scale(sampled, True)

    block = tl.program_id(0) % (3 * H)
    programs = tl.num_programs(0) // (3 * H)
    first_index = tl.program_id(0) // (3 * H)
    pointer, stride_t = _source(
        dq_ptr, dk_ptr, dv_ptr, block, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h
    )
    column = tl.arange(0, BLOCK_D)
    target = block * D + column
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for index in tl.range(first_index, tl.cdiv(T, BLOCK_T), programs, num_stages=STAGES):
        row = index * BLOCK_T + tl.arange(0, BLOCK_T)
        half, mask = _load(pointer, stride_t, row, T, D, BLOCK_D, EVEN)
        x = half.to(tl.float32)
        total += x
        place = row.to(tl.int64)[:, None] * N + target[None, :]
        if HALF:
            tl.store(d_qkv_ptr + place, half, mask=mask)
        if FP8:
            peak = peak_of(peak, x, BLOCK_T, BLOCK_D, GROUP)
            byte = round_to_fp8(x, scale, True)
            tl.store(d_qkv8_ptr + place, byte, mask=mask)
            if TRANSPOSE:
                turned = target.to(tl.int64)[:, None] * T + row[None, :]
                tl.store(transposed_ptr + turned, tl.trans(byte), mask=tl.trans(mask))
    tl.store(partial_ptr + first_index * N + target, tl.sum(total, 0), mask=column < D)
    if FP8:
        finish(peak, known, scale, scale_ptr, pending_ptr, scale_inverse_ptr, True, FROZEN)
