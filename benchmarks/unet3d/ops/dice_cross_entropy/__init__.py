"""The loss: half the Dice loss of the foreground classes plus half the cross-entropy over all classes.

    dice[n, c] = (2 * sum p t + smooth) / (sum t + sum p + smooth)      c = 1 ... K - 1, sums over the voxels of n
    loss = (mean over n, c of (1 - dice[n, c]) + mean over voxels of -log p[label]) / 2

p is the softmax of the logits over the classes, t the one-hot label. Source: ``DiceCELoss`` of the MLPerf Training
reference; Dice after Milletari et al., arXiv:1606.04797, with plain sums in the denominator.
"""

from __future__ import annotations

from benchmarks.unet3d.ops.dice_cross_entropy.reference import TRITON_CLASSES, dice_cross_entropy_reference
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported


def _triton_unsupported(request: OperationRequest) -> str | None:
    if request.sizes["classes"] != TRITON_CLASSES:
        return f"the kernels are written for {TRITON_CLASSES} classes, not {request.sizes['classes']}"
    return triton_unsupported(request)


DICE_CROSS_ENTROPY = Operation(
    "dice_cross_entropy",
    dice_cross_entropy_reference,
    {
        "triton": Implementation(
            "benchmarks.unet3d.ops.dice_cross_entropy.triton:dice_cross_entropy", _triton_unsupported
        ),
    },
    kernel_names=(("cross-entropy", r"^dice_"),),
    cases="benchmarks.unet3d.ops.dice_cross_entropy.cases",
)
"""Signature: ``dice_cross_entropy(logits_NKDHW, label_NDHW, smooth, split=None)``; a request's size is ``classes``."""
