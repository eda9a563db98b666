"""The loss: half the Dice loss of the foreground classes plus half the cross-entropy over all classes.

    dice[n, c] = (2 * sum p t + smooth) / (sum t + sum p + smooth)      c = 1 ... K - 1, sums over the voxels of n
    loss = (mean over n, c of (1 - dice[n, c]) + mean over voxels of -log p[label]) / 2

p is the softmax of the logits over the classes, t the one-hot label. Source: ``DiceCELoss`` of the MLPerf Training
reference; Dice after Milletari et al., arXiv:1606.04797, with plain sums in the denominator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.spatial.split import VolumeSplit
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported, widen

TRITON_CLASSES = 3
"""Number of classes that the Triton kernels support."""


class _Whole(torch.autograd.Function):
    """Sum over the ranks of a split. All ranks have the same loss, so backward passes the gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, split: VolumeSplit) -> Tensor:
        total = value.clone()
        split.sum_(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def dice_cross_entropy_reference(
    logits_NKDHW: Tensor, label_NDHW: Tensor, smooth: float, split: VolumeSplit | None = None
) -> Tensor:
    """Return the mean loss over the N samples, 0-d fp32 (fp64 for fp64 logits).

    Args:
        logits_NKDHW: logits before the softmax; this rank's slab if volumes are split.
        label_NDHW: class of each voxel, uint8, 0 ... K - 1.
        smooth: added to numerator and denominator of every Dice coefficient.
        split: ranks that share each volume. Every rank gets the loss of the whole volumes, and its gradient with
            respect to the rank's own slab.

    Raises:
        ValueError: labels and logits have different shapes.
    """
    check_shapes(logits_NKDHW, label_NDHW)
    label_NDHW = label_NDHW.long()
    log_p = F.log_softmax(widen(logits_NKDHW), 1)
    samples, classes = log_p.shape[:2]
    voxels = label_NDHW[0].numel() * (1 if split is None else split.ranks)
    p = log_p.exp()[:, 1:]
    t = F.one_hot(label_NDHW, classes).movedim(-1, 1)[:, 1:].to(p.dtype)
    volume = (2, 3, 4)
    sums = torch.stack([(p * t).sum(volume), p.sum(volume), t.sum(volume)])
    entropy = F.nll_loss(log_p, label_NDHW, reduction="sum")
    if split is not None:
        whole = _Whole.apply(torch.cat([sums.flatten(), entropy.view(1)]), split)
        sums, entropy = whole[:-1].view_as(sums), whole[-1]
    both, predicted, labelled = sums
    dice = (2 * both + smooth) / (predicted + labelled + smooth)
    return ((1 - dice).mean() + entropy / (samples * voxels)) / 2


def check_shapes(logits_NKDHW: Tensor, label_NDHW: Tensor) -> None:
    """Raise ValueError unless there is one label per voxel of the logits."""
    expected = (logits_NKDHW.shape[0], *logits_NKDHW.shape[2:])
    if tuple(label_NDHW.shape) != expected:
        raise ValueError(f"labels {tuple(label_NDHW.shape)} for logits {tuple(logits_NKDHW.shape)}, not {expected}")


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
