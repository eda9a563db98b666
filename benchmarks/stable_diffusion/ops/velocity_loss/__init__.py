"""Mean squared error of the predicted velocity: the mean over samples of each one's mean over elements.

Forward is a pass over both tensors, backward another, which multiplies by the gradient that comes in, and so by the
loss scale, before it rounds: 2 / (elements of the batch) alone, 4e-6 at 32 samples, is below fp16's normal numbers.
"""

from __future__ import annotations

from benchmarks.stable_diffusion.ops.velocity_loss.reference import velocity_loss_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

VELOCITY_LOSS = Operation(
    "velocity_loss",
    velocity_loss_reference,
    {
        "triton": triton_kernels("benchmarks.stable_diffusion.ops.velocity_loss.triton:velocity_loss"),
    },
    kernel_names=(("noise and loss", r"^velocity_loss_"),),
    cases="benchmarks.stable_diffusion.ops.velocity_loss.cases",
)
"""Signature: ``velocity_loss(prediction_NCHW, target_NCHW)``."""
