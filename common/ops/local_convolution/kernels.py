# mypy: allow-untyped-defs
"""Triton kernels of the 3x3x3 convolution of one input channel, padded with zeros, forward and gradient of the weight.

cuDNN has no kernel for a single channel that uses the matrix units. These make a matrix of patches in registers, whose
rows are output voxels and whose 27 columns, padded to 32, are the taps of the kernel, and multiply it with the weight,
or for the weight's gradient the transposed gradient of the output with it. Each voxel of the input is read 27 times,
out of the L1 cache but for the first time; the output, C out times as large, is written or read once, which bounds both
passes. All taps of a voxel belong to one thread where a tile has at least 32 voxels a warp: which of them exist is then
known from the voxel's place by a few predicates, and a warp reads neighbouring voxels.

Shapes: N samples, V input and U output voxels, C channels out. D H W are the sizes of the input, H_OUT and W_OUT those
of the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAPS: tl.constexpr = tl.constexpr(27)
PADDED: tl.constexpr = tl.constexpr(32)


@triton.jit
def _patches(x_ptr, voxel, D, H, W, H_OUT, W_OUT, STRIDE: tl.constexpr):
    """What output voxels of a sample see of the input, (BLOCK_U, 32); zeros outside the volume."""
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
    """Grid (programs, C / BLOCK_C, N); each program visits each programs-th tile."""
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
    """Gradient of the weight from a program's voxels. Grid (programs, C / BLOCK_C, N)."""
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
        if not EVEN:  # voxels that do not exist see real ones, and 0 times infinity would count
            patches = tl.where((voxel < U)[:, None], patches, 0.0)
        total = tl.dot(tl.trans(patches), dy, total, input_precision="ieee")
    tap = tl.arange(0, PADDED)
    target = ((sample * tl.num_programs(0) + tl.program_id(0)) * C + column)[None, :] * TAPS + tap[:, None]
    tl.store(partial_ptr + target, total, mask=(tap < TAPS)[:, None] & (column < C)[None, :])
