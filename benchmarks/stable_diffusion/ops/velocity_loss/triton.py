"""The velocity's loss through the Triton kernels of :mod:`benchmarks.stable_diffusion.ops.velocity_loss.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Partial sums are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.stable_diffusion.ops.velocity_loss import kernels
from benchmarks.stable_diffusion.ops.velocity_loss.reference import check
from common.ops.tile import Tile

TILES: dict[str, Tile] = {"forward": Tile(elements=2048, warps=4), "backward": Tile(elements=1024, warps=4)}
"""Pass to its tile."""


class _VelocityLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prediction_NCHW: Tensor, target_NCHW: Tensor) -> Tensor:
        prediction_NCHW, target_NCHW = (
            x.contiguous(memory_format=torch.channels_last) for x in (prediction_NCHW, target_NCHW)
        )
        ctx.save_for_backward(prediction_NCHW, target_NCHW)
        elements, tile = prediction_NCHW.numel(), TILES["forward"]
        programs = triton.cdiv(elements, tile.elements)
        partial = prediction_NCHW.new_empty(programs, dtype=torch.float32)
        kernels.velocity_loss_forward_kernel[(programs,)](
            prediction_NCHW, target_NCHW, partial, elements, 1 / elements, BLOCK=tile.elements, num_warps=tile.warps
        )
        return partial.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        prediction_NCHW, target_NCHW = ctx.saved_tensors
        d_prediction_NCHW = torch.empty_like(prediction_NCHW)
        elements, tile = prediction_NCHW.numel(), TILES["backward"]
        kernels.velocity_loss_backward_kernel[(triton.cdiv(elements, tile.elements),)](
            gradients[0], prediction_NCHW, target_NCHW, d_prediction_NCHW, elements, 2 / elements,
            BLOCK=tile.elements, num_warps=tile.warps,
        )  # fmt: skip
        return d_prediction_NCHW, None


def velocity_loss(prediction_NCHW: Tensor, target_NCHW: Tensor) -> Tensor:
    """See :func:`.reference.velocity_loss_reference`. Two launches forward."""
    check(prediction_NCHW, target_NCHW)
    loss: Tensor = _VelocityLoss.apply(prediction_NCHW, target_NCHW)
    return loss
