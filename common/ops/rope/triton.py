# mypy: allow-untyped-defs
"""Triton kernels that split a product q | k | v and rotate q and k, and that join and rotate back the gradients.

A tile is ``BLOCK_T`` tokens of one head, loaded as its two halves. Neighbouring tiles are heads of the same tokens, so
that the tables are in the caches. At the first use of a scale there is no earlier maximum, so every program first
computes a sample of the results.

On an H200 at 8,192 tokens, 64 + 16 heads of 128, 16 bits: forward 336 MB, 78 us at 4.3 TB/s; backward to FP8 252 MB,
59 us.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from common.ops.fp8_cast.device import finish, first_scale, no_peak, peak_of, round_to_fp8
from common.ops.fp8_cast.reference import E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Scaling
from common.ops.fp8_cast.triton import output
from common.ops.tile import Tile
from common.ops.triton_support import programs_for, require_contiguous


@triton.jit
def _angles(cos_ptr, sin_ptr, row, T, HALF_D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the cosines and sines of a tile, and a mask of its elements that exist."""
    column = tl.arange(0, BLOCK_D)
    mask = (row < T)[:, None] & (column < HALF_D)[None, :]
    offset = row[:, None] * HALF_D + column[None, :]
    return tl.load(cos_ptr + offset, mask=mask, other=1.0), tl.load(sin_ptr + offset, mask=mask, other=0.0), mask


@triton.jit
def _offset(row, head, heads, HALF_D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the offsets of a head's first half in a tensor of ``heads`` heads; the second half starts HALF_D later."""
    begin = (row.to(tl.int64) * heads + head) * (2 * HALF_D)
    return begin[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _head(q_ptr, k_ptr, v_ptr, head, H: tl.constexpr, K: tl.constexpr):
    """Return the tensor that contains a head of the product, the index of the head in it, and its number of heads."""
    pointer = q_ptr
    if head >= H:
        pointer = k_ptr
    if head >= H + K:
        pointer = v_ptr
    before = tl.where(head < H, 0, tl.where(head < H + K, H, H + K))
    return pointer, head - before, tl.where(head < H, H, K)


@triton.jit
def _gradient(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, row, head, T,
    H: tl.constexpr, K: tl.constexpr, HALF_D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return both halves of a head of the product's gradient, and a mask of the elements that exist."""
    cos, sin, mask = _angles(cos_ptr, sin_ptr, row, T, HALF_D, BLOCK_D)
    pointer, index, count = _head(dq_ptr, dk_ptr, dv_ptr, head, H, K)
    offset = _offset(row, index, count, HALF_D, BLOCK_D)
    first = tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + offset + HALF_D, mask=mask, other=0.0).to(tl.float32)
    rotated = head < H + K
    d_first = tl.where(rotated, first * cos + second * sin, first)
    return d_first, tl.where(rotated, second * cos - first * sin, second), mask


@triton.jit
def rope_forward_kernel(
    qkv_ptr,  # (T, H + 2K, 2 HALF_D)
    cos_ptr, sin_ptr,  # (T, HALF_D) fp32
    q_ptr,  # (T, H, 2 HALF_D)
    k_ptr, v_ptr,  # (T, K, 2 HALF_D)
    T,
    H: tl.constexpr, K: tl.constexpr, HALF_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store one head of BLOCK_T tokens in q, k or v; heads of q and k are rotated.

    Grid (ceil(T / BLOCK_T) * (H + 2K),).
    """
    all_heads: tl.constexpr = H + 2 * K
    head = tl.program_id(0) % all_heads
    row = tl.program_id(0) // all_heads * BLOCK_T + tl.arange(0, BLOCK_T)
    cos, sin, mask = _angles(cos_ptr, sin_ptr, row, T, HALF_D, BLOCK_D)
    source = _offset(row, head, all_heads, HALF_D, BLOCK_D)
    first = tl.load(qkv_ptr + source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + source + HALF_D, mask=mask, other=0.0).to(tl.float32)
    rotated = head < H + K
    y_first = tl.where(rotated, first * cos - second * sin, first)
    y_second = tl.where(rotated, second * cos + first * sin, second)
    pointer, index, count = _head(q_ptr, k_ptr, v_ptr, head, H, K)
    target = _offset(row, index, count, HALF_D, BLOCK_D)
    tl.store(pointer + target, y_first.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(pointer + target + HALF_D, y_second.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rope_backward_kernel(
    dq_ptr,  # (T, H, 2 HALF_D)
    dk_ptr, dv_ptr,  # (T, K, 2 HALF_D)
    cos_ptr, sin_ptr,  # (T, HALF_D) fp32
    d_qkv_ptr,  # (T, H + 2K, 2 HALF_D), written if HALF
    d_qkv8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # the same in e5m2 and its scale, if FP8
    T,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr, FROZEN: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr,
    HALF_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the product, with heads of q and k rotated back, in 16 bits if HALF and in FP8 if FP8.

    Grid (programs,). Each program processes every ``programs``-th tile.
    """
    all_heads: tl.constexpr = H + 2 * K
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
                for head in range(all_heads):
                    first, second, mask = _gradient(
                        dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, row, head, T, H, K, HALF_D, BLOCK_D
                    )
                    sampled = peak_of(sampled, first, BLOCK_T, BLOCK_D, GROUP)
                    sampled = peak_of(sampled, second, BLOCK_T, BLOCK_D, GROUP)
            scale = first_scale(sampled, True)
    for tile in range(tl.program_id(0), tl.cdiv(T, BLOCK_T) * all_heads, tl.num_programs(0)):
        head = tile % all_heads
        row = tile // all_heads * BLOCK_T + tl.arange(0, BLOCK_T)
        first, second, mask = _gradient(dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, row, head, T, H, K, HALF_D, BLOCK_D)
        target = _offset(row, head, all_heads, HALF_D, BLOCK_D)
        if HALF:
            tl.store(d_qkv_ptr + target, first.to(d_qkv_ptr.dtype.element_ty), mask=mask)
            tl.store(d_qkv_ptr + target + HALF_D, second.to(d_qkv_ptr.dtype.element_ty), mask=mask)
        if FP8:
            peak = peak_of(peak, first, BLOCK_T, BLOCK_D, GROUP)
            peak = peak_of(peak, second, BLOCK_T, BLOCK_D, GROUP)
            tl.store(d_qkv8_ptr + target, round_to_fp8(first, scale, True), mask=mask)
            tl.store(d_qkv8_ptr + target + HALF_D, round_to_fp8(second, scale, True), mask=mask)
    if FP8:
        finish(peak, known, scale, scale_ptr, pending_ptr, scale_inverse_ptr, True, FROZEN)


TILES: dict[str, Tile] = {"forward": Tile(rows=32, warps=4, programs=0), "backward": Tile(rows=32, warps=4, programs=7)}
"""Tile of each pass."""


def forward(
    qkv_TN: Tensor, cos_TD2: Tensor, sin_TD2: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q (T, H, D) and k (T, K, D), and v (T, K, D).

    See :func:`common.ops.rope.forward_reference`. One launch.
    """
    require_contiguous(qkv=qkv_TN, cos=cos_TD2, sin=sin_TD2)
    tokens, half = cos_TD2.shape
    tile = TILES["forward"]
    q_THD = qkv_TN.new_empty((tokens, heads, 2 * half))
    k_TKD, v_TKD = (qkv_TN.new_empty((tokens, kv_heads, 2 * half)) for _ in range(2))
    rope_forward_kernel[(triton.cdiv(tokens, tile.rows) * (heads + 2 * kv_heads),)](
        qkv_TN, cos_TD2, sin_TD2, q_THD, k_TKD, v_TKD, tokens,
        H=heads, K=kv_heads, HALF_D=half, BLOCK_T=tile.rows, BLOCK_D=triton.next_power_of_2(half), num_warps=tile.warps,
    )  # fmt: skip
    return q_THD, k_TKD, v_TKD


def backward(
    dq_THD: Tensor,
    dk_TKD: Tensor,
    dv_TKD: Tensor,
    cos_TD2: Tensor,
    sin_TD2: Tensor,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor | None, Fp8Tensor | None]:
    """Return the gradient of the product, (T, N), if ``half``, and in FP8 if ``fp8``; else None.

    See :func:`common.ops.rope.backward_reference`. One launch.
    """
    require_contiguous(dq=dq_THD, dk=dk_TKD, dv=dv_TKD, cos=cos_TD2, sin=sin_TD2)
    tokens, heads, size = dq_THD.shape
    kv_heads = dk_TKD.shape[1]
    all_heads = heads + 2 * kv_heads
    tile = TILES["backward"]
    block = triton.next_power_of_2(size // 2)
    d_qkv = output(dq_THD, all_heads * size, E5M2, fp8, half=half, frozen_scales=frozen_scales)
    programs = programs_for(triton.cdiv(tokens, tile.rows) * all_heads, tile.programs, dq_THD.device)
    rope_backward_kernel[(programs,)](
        dq_THD, dk_TKD, dv_TKD, cos_TD2, sin_TD2, d_qkv.half, *d_qkv.pointers(), tokens,
        H=heads, K=kv_heads, HALF=half, FP8=fp8 is not None, FROZEN=frozen_scales,
        SAMPLED_ROWS=SAMPLED_ROWS_OF_COMPUTED,
        HALF_D=size // 2, BLOCK_T=tile.rows, BLOCK_D=block, GROUP=min(8, block), num_warps=tile.warps,
    )  # fmt: skip
    return d_qkv.half, d_qkv.fp8(dq_THD.dtype)
