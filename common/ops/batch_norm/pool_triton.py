"""``max_pool(relu(BN(x)), 3, stride 2, padding 1)`` with :mod:`common.ops.batch_norm.pool_kernels`.

Shapes: N images, H x W input, OH x OW output, C channels; all channels_last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from common.ops.batch_norm import pool_kernels as kernels
from common.ops.batch_norm.reference import Norm
from common.ops.batch_norm.triton import coefficients, gradient_sums, statistics
from common.ops.tile import Tile

TILES: dict[str, Tile] = {
    "pool": Tile(pixels=16, channels=64, warps=8),
    "pool_gradient": Tile(pixels=16, channels=64, warps=8),
}
"""Tiles by pass, measured at (400, 64, 112, 112) on an H200. ``pixels``: pixels of the pooled map per program."""


def _cut(name: str, x_NCHW: Tensor, height: int, width: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the size arguments of a launch; ``height`` and ``width`` are those of the pooled map."""
    tile = TILES[name]
    images, channels, in_height, in_width = x_NCHW.shape
    block_c = min(triton.next_power_of_2(channels), tile.channels)
    pixels = images * height * width
    even = in_height % 2 == 0 and in_width % 2 == 0 and pixels % tile.pixels == 0 and channels % block_c == 0
    sizes = {"N": images, "H": in_height, "W": in_width, "C": channels, "OH": height, "OW": width}
    blocks = {"BLOCK": tile.pixels, "BLOCK_C": block_c, "EVEN": even, "num_warps": tile.warps}
    return (triton.cdiv(pixels, tile.pixels) * triton.cdiv(channels, block_c),), {**sizes, **blocks}


def pool(x_NCHW: Tensor, statistics_5C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pooled map, the x of each maximum (both dtype of ``x_NCHW``), and its index in the window (int8)."""
    images, channels, height, width = x_NCHW.shape
    shape = (images, channels, (height + 1) // 2, (width + 1) // 2)
    y_NCHW = torch.empty(shape, dtype=x_NCHW.dtype, device=x_NCHW.device, memory_format=torch.channels_last)
    source_NCHW, place_NCHW = torch.empty_like(y_NCHW), torch.empty_like(y_NCHW, dtype=torch.int8)
    grid, arguments = _cut("pool", x_NCHW, *shape[2:])
    kernels.pool_kernel[grid](x_NCHW, statistics_5C, y_NCHW, source_NCHW, place_NCHW, **arguments)
    return y_NCHW, source_NCHW, place_NCHW


def pool_gradient(dy_NCHW: Tensor, place_NCHW: Tensor, x_NCHW: Tensor, coefficients_3C: Tensor) -> Tensor:
    """Return the gradient of ``x_NCHW``, given that of the pooled map."""
    dx_NCHW = torch.empty_like(x_NCHW)
    grid, arguments = _cut("pool_gradient", x_NCHW, *dy_NCHW.shape[2:])
    kernels.pool_gradient_kernel[grid](dy_NCHW, place_NCHW, x_NCHW, coefficients_3C, dx_NCHW, **arguments)
    return dx_NCHW


class _BatchNormReLUMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NCHW: Tensor, weight: Tensor, bias: Tensor, norm: Norm, group: dist.ProcessGroup | None
    ) -> Tensor:
        x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
        statistics_5C = statistics(x_NCHW, norm, group)
        y_NCHW, source_NCHW, place_NCHW = pool(x_NCHW, statistics_5C)
        ctx.save_for_backward(x_NCHW, statistics_5C, source_NCHW, place_NCHW)
        ctx.group = group
        return y_NCHW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCHW, statistics_5C, source_NCHW, place_NCHW = ctx.saved_tensors
        dy_NCHW = gradients[0].contiguous(memory_format=torch.channels_last)
        partial, _ = gradient_sums(dy_NCHW, None, source_NCHW, statistics_5C, True)
        d_parameters, coefficients_3C = coefficients(partial[0], partial[1], statistics_5C, ctx.group)
        dx_NCHW = pool_gradient(dy_NCHW, place_NCHW, x_NCHW, coefficients_3C)
        return dx_NCHW, d_parameters[1], d_parameters[0], None, None


def batch_norm_relu_max_pool(x_NCHW: Tensor, norm: Norm, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """See :func:`common.ops.batch_norm.reference.batch_norm_relu_max_pool_reference`."""
    result: Tensor = _BatchNormReLUMaxPool.apply(x_NCHW, norm.weight, norm.bias, norm, group)
    return result
