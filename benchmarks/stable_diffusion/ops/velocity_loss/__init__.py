"""Mean squared error of the predicted velocity: the mean over samples of each one's mean over elements.

Forward is a pass over both tensors, backward another, which multiplies by the gradient that comes in, and so by the
loss scale, before it rounds: 2 / (elements of the batch) alone, 4e-6 at 32 samples, is below fp16's normal numbers.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.stable_diffusion.ops.velocity_loss.plain import velocity_loss_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _velocity_loss_triton(prediction_NCHW: Tensor, target_NCHW: Tensor) -> Tensor:
    # triton is imported only where it is used
    from benchmarks.stable_diffusion.ops.velocity_loss.triton import velocity_loss

    return velocity_loss(prediction_NCHW, target_NCHW)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _velocity_loss_triton, triton_unsupported),
    "torch": Implementation("torch", velocity_loss_torch, always),
}
"""Signature: ``velocity_loss(prediction_NCHW, target_NCHW)``."""

KERNEL_NAMES = (("noise and loss", r"^velocity_loss_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
