"""The last layer with the Triton kernels of :mod:`benchmarks.unet3d.ops.output_convolution.kernels`.

Everything is queued on the current stream without waiting for the device. Shapes: N samples, V voxels, C channels, K
classes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.unet3d.ops.output_convolution import kernels
from benchmarks.unet3d.ops.output_convolution.reference import MOST_CHANNELS
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors, require_contiguous

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
    """Return contiguous logits of a channels_last_3d input."""
    require_contiguous(weight=weight, bias=bias_K)
    samples, channels, *volume = x_NCDHW.shape
    voxels, classes = x_NCDHW[0, 0].numel(), len(weight)
    arguments = _arguments(x_NCDHW, TILES["forward"])
    logits_NKDHW = x_NCDHW.new_empty((samples, classes, *volume))
    kernels.output_convolution_kernel[triton.cdiv(voxels, arguments["BLOCK_V"]), samples](
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
    room = multiprocessors(x_NCDHW.device) * tile.programs // samples
    programs = min(triton.cdiv(voxels, arguments["BLOCK_V"]), max(1, room))
    strides = (1, voxels) if dlogits_NKDHW.is_contiguous() else (classes, 1)
    dx_NCDHW = torch.empty_like(x_NCDHW)
    dweight = x_NCDHW.new_empty((samples * programs, classes, channels), dtype=torch.float32)
    dbias = x_NCDHW.new_empty((samples * programs, classes), dtype=torch.float32)
    kernels.output_convolution_backward_kernel[programs, samples](
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
    """See :func:`benchmarks.unet3d.ops.output_convolution.reference.output_convolution_reference`.

    The logits are contiguous.

    Raises:
        ValueError: the kernels do not support so many channels or classes.
    """
    classes, channels = weight.shape[:2]
    if channels > MOST_CHANNELS or classes > kernels.CLASSES.value:
        raise ValueError(
            f"a weight {tuple(weight.shape)}: the kernels hold {MOST_CHANNELS} channels and "
            f"{kernels.CLASSES.value} classes"
        )
    logits_NKDHW: Tensor = _OutputConvolution.apply(x_NCDHW, weight, bias_K)
    return logits_NKDHW
