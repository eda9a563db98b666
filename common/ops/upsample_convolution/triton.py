"""Summed weights with the Triton kernels of :mod:`common.ops.upsample_convolution.kernels`.

All work is enqueued on the current stream, and the host never waits for the device. Weights and gradients may have any
strides.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.tile import Tile
from common.ops.upsample_convolution import kernels

TILES: dict[str, Tile] = {
    "sum": Tile(filters=32, channels=32, warps=4),
    "spread": Tile(filters=32, channels=32, warps=4),
}
"""Tile of each pass. ``filters``, ``channels``: size of the tile in the weight, powers of 2."""


def _run(kernel: Any, tile: Tile, source: Tensor, target: Tensor, weight_OI33: Tensor, taps_IO44: Tensor) -> None:
    filters, channels = weight_OI33.shape[:2]
    taps_OI44 = taps_IO44.transpose(0, 1)
    kernel[triton.cdiv(filters, tile.filters), triton.cdiv(channels, tile.channels)](
        source, target, filters, channels, *weight_OI33.stride(), *taps_OI44.stride(),
        BLOCK_O=tile.filters, BLOCK_I=tile.channels, num_warps=tile.warps,
    )  # fmt: skip


class _SummedTaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_OI33: Tensor) -> Tensor:
        filters, channels = weight_OI33.shape[:2]
        taps_IO44 = torch.empty(
            (channels, filters, 4, 4), dtype=weight_OI33.dtype, device=weight_OI33.device,
            memory_format=torch.channels_last,
        )  # fmt: skip
        _run(kernels.sum_taps_kernel, TILES["sum"], weight_OI33, taps_IO44, weight_OI33, taps_IO44)
        ctx.save_for_backward(weight_OI33)
        return taps_IO44

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weight_OI33,) = ctx.saved_tensors
        dweight_OI33 = torch.empty_like(weight_OI33)
        _run(kernels.spread_taps_kernel, TILES["spread"], gradients[0], dweight_OI33, dweight_OI33, gradients[0])
        return dweight_OI33


def summed_taps(weight_OI33: Tensor) -> Tensor:
    """See :func:`common.ops.upsample_convolution.taps.summed_taps`. One launch per direction."""
    taps_IO44: Tensor = _SummedTaps.apply(weight_OI33)
    return taps_IO44
