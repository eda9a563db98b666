# mypy: allow-untyped-defs
"""Formula that joins the gradients of queries, keys and values, for :func:`common.ops.fp8_cast.device.tiles_kernel`.

A program owns the D columns of one head's queries, keys or values and walks over tiles of tokens. It sums them in
registers and writes one partial sum for the bias gradient; :mod:`common.ops.tiling.column_sums` adds these in a fixed
order. A tile is loaded once and stored in up to three forms: as it is, in FP8, and in FP8 transposed in shared memory,
so that all stores are contiguous. At the first use of a scale there is no earlier maximum, so every program first
computes a scale from a sample.

On an H200 at 4,096 tokens and 24 heads of 128 in 16 bits: to FP8 113 MB, 26 us at 4.3 TB/s; with the transpose 151 MB,
35 us; the sums alone 75 MB, 18 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.fp8_cast.device import load_tile


@triton.jit
def columns_of_head(given, block, D, BLOCK_D: tl.constexpr):
    """Return a block of columns, their mask, the pointer to their gradient, and its token stride.

    A block is the queries, keys or values of one head. ``given``: pointers to the three gradients (T, H, D) with
    contiguous D, and their strides of tokens and heads.
    """
    dq_ptr, dk_ptr, dv_ptr, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h = given
    head, part = block // 3, block % 3
    pointer = dq_ptr
    if part == 1:
        pointer = dk_ptr
    if part == 2:
        pointer = dv_ptr
    stride_t = tl.where(part == 0, q_stride_t, tl.where(part == 1, k_stride_t, v_stride_t))
    stride_h = tl.where(part == 0, q_stride_h, tl.where(part == 1, k_stride_h, v_stride_h))
    offset = tl.arange(0, BLOCK_D)
    first = block * D
    return offset + first, offset < D, pointer + head * stride_h.to(tl.int64) - first, stride_t


@triton.jit
def qkv_gradient(given, columns, inverse, row, T, D):
    """Return a tile of the joined gradient (T, H, 3, D)."""
    return ((load_tile(columns[2], row, columns, T, columns[3]), 0),), ()
