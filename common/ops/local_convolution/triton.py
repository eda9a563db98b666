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

The result is channels_last_3d.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.local_convolution import backward_reference
from common.ops.tile import Tile
from common.ops.triton_support import programs_for

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
    patch_ptr = x_ptr + corner[:, None] + (tap // 9 * H * W + tap // 3 % 3 * W)[None, :] + (tap % 3)[None, :]
    return tl.load(patch_ptr, mask=inside, other=0.0)


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
        tile_ptr = y_ptr + (sample * U + index * BLOCK_U) * C + (tl.arange(0, BLOCK_U)[:, None] * C + column[None, :])
        if EVEN:
            tl.store(tile_ptr, y)
        else:
            tl.store(tile_ptr, y, mask=(voxel < U)[:, None] & (column < C)[None, :])


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
        tile_ptr = dy_ptr + (sample * U + index * BLOCK_U) * C + (tl.arange(0, BLOCK_U)[:, None] * C + column[None, :])
        if EVEN:
            dy = tl.load(tile_ptr)
        else:
            dy = tl.load(tile_ptr, mask=(voxel < U)[:, None] & (column < C)[None, :], other=0.0)
        patches = _patches(x_ptr, voxel, D, H, W, H_OUT, W_OUT, STRIDE)
        if not EVEN:  # voxels beyond U would read existing input, and 0 times infinity is NaN
            patches = tl.where((voxel < U)[:, None], patches, 0.0)
        total = tl.dot(tl.trans(patches), dy, total, input_precision="ieee")
    tap = tl.arange(0, PADDED)
    target = ((sample * tl.num_programs(0) + tl.program_id(0)) * C + column)[None, :] * TAPS + tap[:, None]
    tl.store(partial_ptr + target, total, mask=(tap < TAPS)[:, None] & (column < C)[None, :])


TILES: dict[str, Tile] = {
    "forward": Tile(voxels=128, warps=4, programs=8, stages=1),
    "weight": Tile(voxels=64, warps=2, programs=12, stages=2),
}
"""Tile of each pass. ``voxels``: output voxels per tile, at least 32 per warp."""

_MOST_COLUMNS = 64
_FEWEST_COLUMNS = 16
"""Smallest number of columns of a tensor core product."""


class _Launch(NamedTuple):
    """Grid (programs, columns, samples), sizes and constants of a kernel launch."""

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: dict[str, Any]


def _launch(tile: Tile, x_NCDHW: Tensor, y_shape: torch.Size, stride: int) -> _Launch:
    samples, channels, *volume = y_shape
    voxels = volume[0] * volume[1] * volume[2]
    block_c = min(max(triton.next_power_of_2(channels), _FEWEST_COLUMNS), _MOST_COLUMNS)
    columns = triton.cdiv(channels, block_c)
    programs = programs_for(triton.cdiv(voxels, tile.voxels), tile.programs, x_NCDHW.device, columns * samples)
    constants = {
        "STRIDE": stride,
        "BLOCK_U": tile.voxels,
        "BLOCK_C": block_c,
        "EVEN": voxels % tile.voxels == 0 and channels % block_c == 0,
        "num_warps": tile.warps,
    }
    return _Launch((programs, columns, samples), (*x_NCDHW.shape[2:], *volume[1:], voxels, channels), constants)


def forward(x_NCDHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the convolution, padded with zeros, of (N, 1, D, H, W) with (C out, 1, 3, 3, 3)."""
    volume = [(size - 1) // stride + 1 for size in x_NCDHW.shape[2:]]
    shape = torch.Size((len(x_NCDHW), len(weight), *volume))
    y_NCDHW = torch.empty(shape, dtype=x_NCDHW.dtype, device=x_NCDHW.device, memory_format=torch.channels_last_3d)
    grid, sizes, constants = _launch(TILES["forward"], x_NCDHW, shape, stride)
    single_channel_forward_kernel[grid](x_NCDHW.contiguous(), weight.contiguous(), y_NCDHW, *sizes, **constants)
    return y_NCDHW


def weight_gradient(dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the weight gradient, in the shape and dtype of ``weight``.

    Each program writes a partial sum in fp32; these are added in a fixed order.
    """
    tile = TILES["weight"]
    (programs, columns, samples), sizes, constants = _launch(tile, x_NCDHW, dy_NCDHW.shape, stride)
    partial = x_NCDHW.new_empty((samples, programs, *weight.shape), dtype=torch.float32)
    single_channel_weight_kernel[programs, columns, samples](
        dy_NCDHW.contiguous(memory_format=torch.channels_last_3d), x_NCDHW.contiguous(), partial, *sizes,
        STAGES=tile.stages, **constants,
    )  # fmt: skip
    return partial.sum((0, 1)).to(weight.dtype)


def backward(
    dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight; None for a gradient that is not needed."""
    # a single input channel is usually the image, which needs no gradient, so there is no kernel for it
    dx_NCDHW, _ = backward_reference(dy_NCDHW, x_NCDHW, weight, stride, (True, False)) if needs[0] else (None, None)
    return dx_NCDHW, weight_gradient(dy_NCDHW, x_NCDHW, weight, stride) if needs[1] else None
