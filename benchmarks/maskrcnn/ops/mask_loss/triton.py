"""The mask head's loss through the Triton kernels of :mod:`benchmarks.maskrcnn.ops.mask_loss.kernels`.

Everything is enqueued on the current stream and nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from benchmarks.maskrcnn.ops.mask_loss import kernels
from benchmarks.maskrcnn.ops.mask_loss.plain import check, pixels_that_count


class Tile(NamedTuple):
    """How a pass walks over the pixels of a region.

    Attributes:
        elements: of a program at a time: logits that are read forward, gradients that are written backward.
        warps: of a program.
    """

    elements: int
    warps: int


TILES: dict[str, Tile] = {"forward": Tile(1024, 4), "backward": Tile(4096, 4)}
"""Pass to its tile. ``bench --sweep`` times others."""


class _MaskLoss(Function):
    @staticmethod
    def forward(ctx: Any, logits_RKHW: Tensor, target_RHW: Tensor, class_R: Tensor) -> Tensor:
        logits_RKHW = logits_RKHW.contiguous(memory_format=torch.channels_last)
        regions, channels, *size = logits_RKHW.shape
        pixels = size[0] * size[1]
        divisor = pixels_that_count(class_R, pixels)
        ctx.save_for_backward(logits_RKHW, target_RHW, class_R, divisor)
        sum_R = torch.empty(regions, dtype=torch.float32, device=logits_RKHW.device)
        tile = TILES["forward"]
        if regions:
            kernels.mask_loss_forward_kernel[(regions,)](
                logits_RKHW, target_RHW, class_R, sum_R, pixels, channels,
                BLOCK=min(tile.elements, triton.next_power_of_2(pixels)), num_warps=tile.warps,
            )  # fmt: skip
        return sum_R.sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits_RKHW, target_RHW, class_R, divisor = ctx.saved_tensors
        regions, channels, *size = logits_RKHW.shape
        pixels, tile = size[0] * size[1], TILES["backward"]
        d_logits_RKHW = torch.empty_like(logits_RKHW, memory_format=torch.channels_last)
        width = triton.next_power_of_2(channels)
        block = min(max(tile.elements // width, 1), triton.next_power_of_2(pixels))
        if regions:
            kernels.mask_loss_backward_kernel[(triton.cdiv(pixels, block), regions)](
                gradients[0] / divisor, logits_RKHW, target_RHW, class_R, d_logits_RKHW, pixels, channels,
                BLOCK=block, BLOCK_K=width, num_warps=tile.warps,
            )  # fmt: skip
        return d_logits_RKHW, None, None


def mask_loss(logits_RKHW: Tensor, target_RHW: Tensor, class_R: Tensor) -> Tensor:
    """See :func:`benchmarks.maskrcnn.ops.mask_loss.plain.mask_loss_torch`."""
    check(logits_RKHW, target_RHW, class_R)
    loss: Tensor = _MaskLoss.apply(logits_RKHW, target_RHW.contiguous(), class_R.contiguous())
    return loss
