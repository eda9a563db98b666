# mypy: allow-untyped-defs
"""Formula that joins the gradients of queries, keys and values, for :func:`common.ops.fp8_cast.device.tiles_kernel`.

A program owns the D columns of one head's queries, keys or values and walks over tiles of tokens. It sums them in
registers and writes one partial sum for the bias gradient; :mod:`common.ops.tiling` adds these in a fixed
order. A tile is loaded once and stored in up to three forms: as it is, in FP8, and in FP8 transposed in shared memory,
so that all stores are contiguous. At the first use of a scale there is no earlier maximum, so every program first
computes a scale from a sample.

On an H200 at 4,096 tokens and 24 heads of 128 in 16 bits: to FP8 113 MB, 26 us at 4.3 TB/s; with the transpose 151 MB,
35 us; the sums alone 75 MB, 18 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.fp8_cast.device import load_tile
from common.ops.fp8_cast.reference import E5M2, Scaling
from common.ops.fp8_cast.triton import launch, output
from common.ops.qkv_gradient import QkvGradient, check, joined
from common.ops.tile import Tile
from common.ops.tiling import column_sums


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
    """Load a tile of the joined gradient (T, H, 3, D), the only part of the result. Other arguments are not used."""
    return ((load_tile(columns[2], row, columns, T, columns[3]), 0),), ()


TILES: dict[str, Tile] = {"join": Tile(rows=64, warps=8, programs=4, stages=3)}
"""Tile of the pass. ``rows``: tokens of one head per tile."""


def join(
    dq_THD: Tensor,
    dk_THD: Tensor,
    dv_THD: Tensor,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    transpose: bool = False,
    frozen_scales: bool = False,
) -> QkvGradient:
    """Return the joined gradient (T, N), in FP8 too if ``fp8``, and its sums over tokens (N,).

    See :func:`common.ops.qkv_gradient.join_reference`. Two launches; only the scale uses atomics.
    """
    check(dq_THD, dk_THD, dv_THD)
    tokens, heads, size = dq_THD.shape
    columns = 3 * heads * size
    there_TN = joined(dq_THD, dk_THD, dv_THD)
    d_qkv = output(
        dq_THD, columns, E5M2, fp8,
        half=half and there_TN is None, transpose=transpose, frozen_scales=frozen_scales,
    )  # fmt: skip
    partial = launch(
        qkv_gradient, TILES["join"],
        (dq_THD, dk_THD, dv_THD, *dq_THD.stride()[:2], *dk_THD.stride()[:2], *dv_THD.stride()[:2]),
        tokens, tl.constexpr(size), d_qkv, columns=columns_of_head,
        block=triton.next_power_of_2(size), blocks=3 * heads, own_columns=True, sums=True,
    )  # fmt: skip
    given_TN = (d_qkv.half if there_TN is None else there_TN) if half else None
    return QkvGradient(given_TN, d_qkv.fp8(dq_THD.dtype), column_sums(partial, torch.float32))
