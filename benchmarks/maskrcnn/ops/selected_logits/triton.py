"""Selected logits with the Triton kernels of :mod:`benchmarks.maskrcnn.ops.selected_logits.kernels`.

There is one launch forward and two backward. Nothing waits for the device, and sums use no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from benchmarks.maskrcnn.ops.selected_logits import kernels
from benchmarks.maskrcnn.ops.selected_logits.reference import check
from common.ops.tile import Tile

TILES: dict[str, Tile] = {
    "forward": Tile(elements=8192, warps=4),
    "backward": Tile(elements=8192, shares=4, warps=4),
    "sums": Tile(rows=64, columns=64, warps=4),
}
"""Name of the pass to its tile of whole pixels. ``shares``: maximum programs per region, each with its own sums."""


class _SelectedLogits(Function):
    @staticmethod
    def forward(ctx: Any, x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> Tensor:
        x_RPC, weight_KC = x_RPC.contiguous(), weight_KC.contiguous()
        ctx.save_for_backward(x_RPC, weight_KC, class_R)
        ctx.bias_dtype = bias_K.dtype
        regions, pixels, channels = x_RPC.shape
        logits_RP = torch.empty((regions, pixels), dtype=torch.float32, device=x_RPC.device)
        tile = TILES["forward"]
        block, width = _block(tile.elements, pixels, channels)
        if logits_RP.numel():
            kernels.selected_logits_forward_kernel[(triton.cdiv(pixels, block), regions)](
                x_RPC, weight_KC, bias_K.contiguous(), class_R, logits_RP, pixels, channels,
                BLOCK=block, BLOCK_C=width, num_warps=tile.warps,
            )  # fmt: skip
        return logits_RP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_RPC, weight_KC, class_R = ctx.saved_tensors
        regions, pixels, channels = x_RPC.shape
        tile = TILES["backward"]
        block, width = _block(tile.elements, pixels, channels)
        shares = min(tile.shares, triton.cdiv(pixels, block))
        dx_RPC, d_weight_KC = torch.empty_like(x_RPC), torch.empty_like(weight_KC)
        d_bias_K = torch.empty(len(weight_KC), dtype=ctx.bias_dtype, device=x_RPC.device)
        partial_RSX = torch.empty((regions, shares, channels + 1), dtype=torch.float32, device=x_RPC.device)
        if dx_RPC.numel():
            kernels.selected_logits_backward_kernel[(shares, regions)](
                gradients[0].contiguous(), x_RPC, weight_KC, class_R, dx_RPC, partial_RSX, pixels, channels,
                BLOCK=block, BLOCK_C=width, num_warps=tile.warps,
            )  # fmt: skip
        sums = TILES["sums"]
        kernels.selected_logits_sums_kernel[(len(weight_KC), triton.cdiv(channels + 1, sums.columns))](
            partial_RSX, class_R, d_weight_KC, d_bias_K, regions, shares, channels,
            BLOCK=sums.rows, BLOCK_C=sums.columns, num_warps=sums.warps,
        )  # fmt: skip
        return dx_RPC, d_weight_KC, d_bias_K, None


def _block(elements: int, pixels: int, channels: int) -> tuple[int, int]:
    """Return the pixels and channels of a tile."""
    width = triton.next_power_of_2(channels)
    return max(min(elements // width, triton.next_power_of_2(pixels)), 1), width


def selected_logits(x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> Tensor:
    """See :func:`benchmarks.maskrcnn.ops.selected_logits.reference.selected_logits_reference`."""
    check(x_RPC, weight_KC, bias_K, class_R)
    logits_RP: Tensor = _SelectedLogits.apply(x_RPC, weight_KC, bias_K, class_R.contiguous())
    return logits_RP
