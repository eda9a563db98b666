# mypy: allow-untyped-defs
"""Triton kernels of the 3x3x3 convolution of one input channel, padded with zeros: forward and weight gradient.

cuDNN has no kernel for a single channel that uses the tensor cores. These kernels build a matrix of patches in
registers. Its rows are output voxels, and its 27 columns, padded to 32, are the taps. Forward multiplies it by the
weight; the weight gradient multiplies its transpose by the gradient of the output.

Each input voxel is read 27 times, mostly from the L1 cache. The output, which is C times as large, is read or written
once and bounds the time of both passes. If a tile has at least 32 voxels per warp, one thread holds all taps of a
voxel: a few predicates then determine which taps exist, and a warp reads neighbouring voxels.

Shapes: N samples, V input and U output voxels, C output channels. D H W are the sizes of the input, H_OUT and W_OUT
those of the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAPS: tl.constexpr = tl.constexpr(27)
PADDED: tl.constexpr = tl.constexpr(32)


@triton.jit
def _patches(x_ptr, voxel, D, H, W, H_OUT, W_OUT, STRIDE: tl.constexpr):
    """Return the input patches of the output voxels of a sample, (BLOCK_U, 32); zeros outside the volume."""
    tap = tl.arange(0, PADDED)
    row = voxel // W_OUT
    d = (row // H_OUT * STRIDE - 1)[:, None] + (tap // 9)[None, :]
    h = (row % H_OUT * STRIDE - 1)[:, None] + (tap // 3 % 3)[None, :]
    w = (voxel % W_OUT * STRIDE - 1)[:, None] + (tap % 3)[None, :]
    inside = (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W) & (tap < TAPS)[None, :]
    corner = (row // H_OUT * STRIDE - 1) * H * W + (row % H_OUT * STRIDE - 1) * W + (voxel % W_OUT * STRIDE - 1)
    place = x_ptr + corner[:, None] + (tap // 9 * H * W + tap // 3 % 3 * W)[None, :] + (tap % 3)[None, :]
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def single_channel_forward_kernel(
    x_ptr,  # (N, V)
    weight_ptr,  # (C, 27)
    y_ptr,  # (N, U, C)
    D, H, W, H_OUT, W_OUT, U, C,
    STRIDE: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_C output channels of every ``programs``-th tile of BLOCK_U voxels of a sample.

    Grid (programs, ceil(C / BLOCK_C), N).
    """
    sample = tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.arange(0, PADDED)
    known = (tap < TAPS)[:, None] & (column < C)[None, :]
    weight = tl.load(weight_ptr + column[None, :] * TAPS + tap[:, None], mask=known, other=0.0)
    x_ptr += sample * D * H * W
    for index in range(tl.program_id(0), tl.cdiv(U, BLOCK_U), tl.num_programs(0)):
        voxel = index * BLOCK_U + tl.arange(0, BLOCK_U)
        patches = _patches(x_ptr, voxel, D, H, W, H_OUT, W_OUT, STRIDE)
        y = tl.dot(patches, weight, input_precision="ieee").to(y_ptr.dtype.element_ty)
        place = y_ptr + (sample * U + index * BLOCK_U) * C + (tl.arange(0, BLOCK_U)[:, None] * C + column[None, :])
        if EVEN:
            tl.store(place, y)
        else:
            tl.store(place, y, mask=(voxel < U)[:, None] & (column < C)[None, :])


@triton.jit
def single_channel_weight_kernel(
    dy_ptr,  # (N, U, C)
    x_ptr,  # (N, V)
    partial_ptr,  # (N, programs, C, 27) fp32
    D, H, W, H_OUT, W_OUT, U, C,
    STRIDE: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the weight gradient of this program's voxels. Grid (programs, ceil(C / BLOCK_C), N)."""
    sample = tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((PADDED, BLOCK_C), tl.float32)
    x_ptr += sample * D * H * W
    for index in tl.range(tl.program_id(0), tl.cdiv(U, BLOCK_U), tl.num_programs(0), num_stages=STAGES):
        voxel = index * BLOCK_U + tl.arange(0, BLOCK_U)
        place = dy_ptr + (sample * U + index * BLOCK_U) * C + (tl.arange(0, BLOCK_U)[:, None] * C + column[None, :])
        if EVEN:
            dy = tl.load(place)
        else:
            dy = tl.load(place, mask=(voxel < U)[:, None] & (column < C)[None, :], other=0.0)
        patches = _patches(x_ptr, voxel, D, H, W, H_OUT, W_OUT, STRIDE)
        if not EVEN:  # voxels beyond U would read existing input, and 0 times infinity is NaN
            patches = tl.where((voxel < U)[:, None], patches, 0.0)
        total = tl.dot(tl.trans(patches), dy, total, input_precision="ieee")
    tap = tl.arange(0, PADDED)
    target = ((sample * tl.num_programs(0) + tl.program_id(0)) * C + column)[None, :] * TAPS + tap[:, None]
    tl.store(partial_ptr + target, total, mask=(tap < TAPS)[:, None] & (column < C)[None, :])
