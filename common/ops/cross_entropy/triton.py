"""Masked cross-entropy with the Triton kernels of :mod:`common.ops.cross_entropy.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: M masked tokens, V columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.cross_entropy import kernels
from common.ops.cross_entropy.reference import NO_LABEL
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {"forward": Tile(columns=4096, warps=8), "backward": Tile(columns=4096, warps=8)}
"""Tiles by pass."""


def _launch(tile: Tile, columns: int) -> dict[str, int]:
    return {"BLOCK": min(tile.columns, triton.next_power_of_2(columns)), "num_warps": tile.warps}


def forward(logits_MV: Tensor, labels_M: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (M,) fp32, correct (M,) bool, and log-sum-exp (M,) fp32, which only rows with a label have."""
    require_contiguous(logits=logits_MV, labels=labels_M)
    rows, columns = logits_MV.shape
    losses_M = logits_MV.new_empty(rows, dtype=torch.float32)
    correct_M = torch.empty_like(losses_M, dtype=torch.bool)
    lse_M = torch.empty_like(losses_M)
    kernels.cross_entropy_forward_kernel[(rows,)](
        logits_MV, labels_M, losses_M, correct_M, lse_M, columns, vocabulary, **_launch(TILES["forward"], columns)
    )
    return losses_M, correct_M, lse_M


def backward(
    d_losses_M: Tensor, logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, vocabulary: int, inplace: bool
) -> Tensor:
    """Return the gradient of the logits, which overwrites them if ``inplace``."""
    require_contiguous(d_losses=d_losses_M, logits=logits_MV, labels=labels_M, lse=lse_M)
    rows, columns = logits_MV.shape
    d_logits_MV = logits_MV if inplace else torch.empty_like(logits_MV)
    kernels.cross_entropy_backward_kernel[(rows,)](
        d_losses_M, logits_MV, labels_M, lse_M, d_logits_MV, columns, vocabulary, **_launch(TILES["backward"], columns)
    )
    return d_logits_MV


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor, vocabulary: int, inplace: bool) -> tuple[Tensor, Tensor]:
        logits_MV = logits_MV.contiguous()
        losses_M, correct_M, lse_M = forward(logits_MV, labels_M, vocabulary)
        ctx.save_for_backward(logits_MV, labels_M, lse_M)
        ctx.mark_non_differentiable(correct_M)
        ctx.vocabulary, ctx.inplace = vocabulary, inplace
        return losses_M, correct_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits_MV, labels_M, lse_M = ctx.saved_tensors
        d_losses_M = gradients[0].contiguous()
        return backward(d_losses_M, logits_MV, labels_M, lse_M, ctx.vocabulary, ctx.inplace), None, None, None


def masked_cross_entropy(
    logits_MV: Tensor, labels_M: Tensor, vocabulary: int, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`common.ops.cross_entropy.reference.masked_cross_entropy_reference`.

    With ``inplace`` backward overwrites the logits with their gradient. So it can run only once, and afterwards neither
    the caller nor the backward pass of the operation that computed the logits may read them.
    """
    result: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits_MV, labels_M.contiguous(), vocabulary, inplace)
    return result


@torch.no_grad()
def log_sum_exp(logits_MV: Tensor, labels_M: Tensor, vocabulary: int) -> Tensor:
    """See :func:`common.ops.cross_entropy.reference.log_sum_exp_reference`.

    Rows without a label stay uninitialised.
    """
    any_label_M = torch.where(labels_M == NO_LABEL, NO_LABEL, 0)  # the kernel also reads the logit of the label
    return forward(logits_MV, any_label_M, vocabulary)[2]


@torch.no_grad()
def gradient(d_losses_M: Tensor, logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, vocabulary: int) -> Tensor:
    """See :func:`common.ops.cross_entropy.reference.gradient_reference`."""
    return backward(d_losses_M, logits_MV, labels_M, lse_M, vocabulary, True)
