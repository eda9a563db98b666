"""Upsampling with the Triton kernel of :mod:`benchmarks.unet3d.ops.upsample.kernels`.

cuDNN computes the gradients of input and weight. The gradient of the skip connection is a view of the concatenated
gradient, which it keeps alive. Everything is queued on the current stream without waiting for the device. Activations
and weights in other formats are copied to channels_last_3d first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.unet3d.ops.upsample import kernels
from benchmarks.unet3d.ops.upsample.reference import check_shapes
from common.ops.tile import Tile
from common.ops.tiling.tiles import cut
from common.ops.triton_support import require_contiguous

FORWARD_TILES: dict[str, Tile] = {"forward": Tile(rows=64, columns=128, channels=64, warps=4)}
BACKWARD_TILES: dict[str, Tile] = {"backward": Tile(columns=128, elements=4096, warps=4, programs=4, stages=3)}
"""Tile by pass. In ``forward``: ``rows`` are voxels, ``columns`` filters at taps, ``channels`` input channels per
iteration.
"""

_SMALLEST_TILE = 16  # smallest dimension of a product
_FORMAT = torch.channels_last_3d


def forward(x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, skip_NCDHW: Tensor) -> Tensor:
    """Return the concatenated channels of channels_last_3d inputs."""
    require_contiguous(bias=bias_C)
    samples, channels_in, _, height, width = x_NCDHW.shape
    channels = weight.shape[1]
    rows, columns = x_NCDHW.numel() // channels_in, 8 * channels
    tile = FORWARD_TILES["forward"]
    block_n = max(min(tile.columns, triton.next_power_of_2(columns)), _SMALLEST_TILE)
    shape = (samples, 2 * channels, *skip_NCDHW.shape[2:])
    joined = torch.empty(shape, dtype=x_NCDHW.dtype, device=x_NCDHW.device, memory_format=_FORMAT)
    kernels.upsample_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, block_n),)](
        x_NCDHW, weight, bias_C, skip_NCDHW, joined, rows, height, width, channels_in, C=channels,
        PRECISION="ieee" if x_NCDHW.dtype == torch.float32 else "tf32",  # ignored for 16-bit inputs
        BLOCK_M=tile.rows, BLOCK_N=block_n,
        BLOCK_K=max(min(tile.channels, triton.next_power_of_2(channels_in)), _SMALLEST_TILE), num_warps=tile.warps,
    )  # fmt: skip
    return joined


def take_apart(d_joined: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy the first half of the channels of a channels_last_3d (N, 2C, D, H, W); return it and its sums in
    ``dtype``.
    """
    channels = d_joined.shape[1] // 2
    d_up_NCDHW = torch.empty_like(d_joined[:, :channels], memory_format=_FORMAT)
    rows = d_up_NCDHW.numel() // channels
    pass_ = cut(BACKWARD_TILES["backward"], 1, rows, channels, d_joined.device, reverse=False)
    partial = d_joined.new_empty((pass_.grid[0], channels), dtype=torch.float32)
    kernels.upsample_backward_kernel[pass_.grid](d_joined, d_up_NCDHW, partial, rows, channels, **pass_.arguments)
    return d_up_NCDHW, partial.sum(0).to(dtype)


class _Upsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, skip_NCDHW: Tensor) -> Tensor:
        x_NCDHW, weight, skip_NCDHW = (t.contiguous(memory_format=_FORMAT) for t in (x_NCDHW, weight, skip_NCDHW))
        ctx.save_for_backward(x_NCDHW, weight)
        ctx.bias_dtype = bias_C.dtype
        return forward(x_NCDHW, weight, bias_C, skip_NCDHW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCDHW, weight = ctx.saved_tensors
        d_joined = gradients[0].contiguous(memory_format=_FORMAT)
        d_up_NCDHW, d_bias_C = take_apart(d_joined, ctx.bias_dtype)
        needs = [*ctx.needs_input_grad[:2], False]
        dx_NCDHW, dweight, _ = torch.ops.aten.convolution_backward(
            d_up_NCDHW, x_NCDHW, weight, None, [2] * 3, [0] * 3, [1] * 3, True, [0] * 3, 1, needs
        )
        return dx_NCDHW, dweight, d_bias_C, d_joined[:, weight.shape[1] :]


def upsample(x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, skip_NCDHW: Tensor) -> Tensor:
    """See :func:`benchmarks.unet3d.ops.upsample.reference.upsample_reference`; the result is channels_last_3d."""
    check_shapes(x_NCDHW, weight, skip_NCDHW)
    joined: Tensor = _Upsample.apply(x_NCDHW, weight, bias_C, skip_NCDHW)
    return joined
