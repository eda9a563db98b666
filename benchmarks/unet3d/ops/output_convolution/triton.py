# mypy: allow-untyped-defs
"""Triton kernels of a 1x1x1 convolution from C channels to K <= 16 classes over N samples of V voxels.

The input is (N, V, C) in memory, the logits are (N, K, V): every class is a separate plane, which a warp writes and
the loss reads in whole cache lines. Tiles of logits are transposed, classes by voxels, and padded to the 16 rows of a
tensor core's tile. Backward reads input and gradient once and writes dx. Each program keeps its part of the gradients
of weight and bias in registers until its end.

At 7 samples of 128^3 voxels, C = 32, K = 3, 16 bit: forward 1.03 GB, 0.24 ms at 4.3 TB/s on an H200; backward 1.97
GB, 0.46 ms.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.unet3d.ops.output_convolution import MOST_CHANNELS
from common.ops.tile import Tile
from common.ops.triton_support import programs_for, require_contiguous

CLASSES: tl.constexpr = tl.constexpr(16)


@triton.jit
def _weight(weight_ptr, K, C, BLOCK_C: tl.constexpr):
    """Load the weight as (16, BLOCK_C), padded with zeros."""
    class_, channel = tl.arange(0, CLASSES), tl.arange(0, BLOCK_C)
    inside = (class_ < K)[:, None] & (channel < C)[None, :]
    return tl.load(weight_ptr + class_[:, None] * C + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _input_tile(V, C, voxel, BLOCK_C: tl.constexpr):
    """Return offsets and mask of a tile (voxels, BLOCK_C) of this program's sample."""
    channel = tl.arange(0, BLOCK_C)
    offset = (tl.program_id(1).to(tl.int64) * V + voxel)[:, None] * C + channel[None, :]
    return offset, (voxel < V)[:, None] & (channel < C)[None, :]


@triton.jit
def output_convolution_kernel(
    x_ptr,  # (N, V, C)
    weight_ptr,  # (K, C)
    bias_ptr,  # (K,)
    logits_ptr,  # (N, K, V)
    V, K, C,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the logits of BLOCK_V voxels. Grid (ceil(voxels / BLOCK_V), N)."""
    voxel = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    offset, inside = _input_tile(V, C, voxel, BLOCK_C)
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    class_ = tl.arange(0, CLASSES)
    logits = tl.dot(_weight(weight_ptr, K, C, BLOCK_C), tl.trans(x), input_precision=PRECISION)
    logits += tl.load(bias_ptr + class_, mask=class_ < K, other=0.0).to(tl.float32)[:, None]
    target = (tl.program_id(1).to(tl.int64) * K + class_)[:, None] * V + voxel[None, :]
    mask = (class_ < K)[:, None] & (voxel < V)[None, :]
    tl.store(logits_ptr + target, logits.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def output_convolution_backward_kernel(
    dlogits_ptr,  # (N, K, V) or (N, V, K)
    x_ptr,  # (N, V, C)
    weight_ptr,  # (K, C)
    dx_ptr,  # (N, V, C)
    dweight_ptr,  # (N * programs, K, C) fp32
    dbias_ptr,  # (N * programs, K) fp32
    V, K, C, voxel_stride, class_stride,
    PRECISION: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx and partial dweight and dbias; a program takes every programs-th block. Grid (programs, N)."""
    weight = _weight(weight_ptr, K, C, BLOCK_C)
    class_, channel = tl.arange(0, CLASSES), tl.arange(0, BLOCK_C)
    dweight = tl.zeros((CLASSES, BLOCK_C), tl.float32)
    dbias = tl.zeros((CLASSES, BLOCK_V), tl.float32)
    dlogits_ptr += tl.program_id(1).to(tl.int64) * V * K
    for index in tl.range(tl.program_id(0), tl.cdiv(V, BLOCK_V), tl.num_programs(0), num_stages=STAGES):
        voxel = index * BLOCK_V + tl.arange(0, BLOCK_V)
        offset, inside = _input_tile(V, C, voxel, BLOCK_C)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0)
        source = class_.to(tl.int64)[:, None] * class_stride + voxel.to(tl.int64)[None, :] * voxel_stride
        mask = (class_ < K)[:, None] & (voxel < V)[None, :]
        dlogits = tl.load(dlogits_ptr + source, mask=mask, other=0.0)
        dx = tl.dot(tl.trans(dlogits), weight, input_precision=PRECISION)
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dweight = tl.dot(dlogits, x, dweight, input_precision=PRECISION)
        dbias += dlogits.to(tl.float32)
    share = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    inside = (class_ < K)[:, None] & (channel < C)[None, :]
    tl.store(dweight_ptr + (share * K + class_)[:, None] * C + channel[None, :], dweight, mask=inside)
    tl.store(dbias_ptr + share * K + class_, tl.sum(dbias, 1), mask=class_ < K)


TILES: dict[str, Tile] = {
    "forward": Tile(voxels=512, warps=8, programs=0, stages=1),
    "backward": Tile(voxels=64, warps=4, programs=8, stages=3),
}
"""Tile by pass. ``voxels``: voxels per block."""

_SMALLEST_TILE = 16  # smallest dimension of a product
_MOST_TILE_BYTES = 1 << 15  # largest input tile: two copies must fit into 100 KB of shared memory


def _arguments(x_NCDHW: Tensor, tile: Tile) -> dict[str, Any]:
    """Return the last arguments of both kernels."""
    channels, voxels = x_NCDHW.shape[1], x_NCDHW[0, 0].numel()
    most = _MOST_TILE_BYTES // (max(triton.next_power_of_2(channels), _SMALLEST_TILE) * x_NCDHW.element_size())
    return {
        "PRECISION": "ieee" if x_NCDHW.dtype == torch.float32 else "tf32",  # ignored for 16-bit inputs
        "BLOCK_V": max(min(tile.voxels, most, triton.next_power_of_2(voxels)), _SMALLEST_TILE),
        "BLOCK_C": max(triton.next_power_of_2(channels), _SMALLEST_TILE),
        "num_warps": tile.warps,
    }


def forward(x_NCDHW: Tensor, weight: Tensor, bias_K: Tensor) -> Tensor:
    """Return contiguous logits (N, K, D, H, W) of a channels_last_3d input."""
    require_contiguous(weight=weight, bias=bias_K)
    samples, channels, *volume = x_NCDHW.shape
    voxels, classes = x_NCDHW[0, 0].numel(), len(weight)
    arguments = _arguments(x_NCDHW, TILES["forward"])
    logits_NKDHW = x_NCDHW.new_empty((samples, classes, *volume))
    output_convolution_kernel[triton.cdiv(voxels, arguments["BLOCK_V"]), samples](
        x_NCDHW, weight, bias_K, logits_NKDHW, voxels, classes, channels, **arguments
    )
    return logits_NKDHW


def backward(dlogits_NKDHW: Tensor, x_NCDHW: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the weight and the bias.

    Args:
        dlogits_NKDHW: contiguous or channels_last_3d.
        x_NCDHW: channels_last_3d.
        weight: (K, C, 1, 1, 1).
    """
    samples, channels = x_NCDHW.shape[:2]
    voxels, classes = x_NCDHW[0, 0].numel(), len(weight)
    tile = TILES["backward"]
    arguments = _arguments(x_NCDHW, tile)
    programs = programs_for(triton.cdiv(voxels, arguments["BLOCK_V"]), tile.programs, x_NCDHW.device, samples)
    strides = (1, voxels) if dlogits_NKDHW.is_contiguous() else (classes, 1)
    dx_NCDHW = torch.empty_like(x_NCDHW)
    dweight = x_NCDHW.new_empty((samples * programs, classes, channels), dtype=torch.float32)
    dbias = x_NCDHW.new_empty((samples * programs, classes), dtype=torch.float32)
    output_convolution_backward_kernel[programs, samples](
        dlogits_NKDHW, x_NCDHW, weight, dx_NCDHW, dweight, dbias, voxels, classes, channels, *strides,
        STAGES=tile.stages, **arguments,
    )  # fmt: skip
    return dx_NCDHW, dweight.sum(0).view_as(weight).to(weight.dtype), dbias.sum(0).to(weight.dtype)


class _OutputConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NCDHW: Tensor, weight: Tensor, bias_K: Tensor) -> Tensor:
        x_NCDHW = x_NCDHW.contiguous(memory_format=torch.channels_last_3d)
        weight = weight.contiguous()
        ctx.save_for_backward(x_NCDHW, weight)
        return forward(x_NCDHW, weight, bias_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        dlogits_NKDHW = gradients[0]
        if not dlogits_NKDHW.is_contiguous(memory_format=torch.channels_last_3d):
            dlogits_NKDHW = dlogits_NKDHW.contiguous()
        return backward(dlogits_NKDHW, *ctx.saved_tensors)


def output_convolution(x_NCDHW: Tensor, weight: Tensor, bias_K: Tensor) -> Tensor:
    """Return the logits (N, K, D, H, W).

    See :func:`benchmarks.unet3d.ops.output_convolution.output_convolution_reference`. The logits are contiguous.

    Raises:
        ValueError: the kernels do not support so many channels or classes.
    """
    classes, channels = weight.shape[:2]
    if channels > MOST_CHANNELS or classes > CLASSES.value:
        raise ValueError(
            f"a weight {tuple(weight.shape)}: the kernels hold {MOST_CHANNELS} channels and {CLASSES.value} classes"
        )
    logits_NKDHW: Tensor = _OutputConvolution.apply(x_NCDHW, weight, bias_K)
    return logits_NKDHW
