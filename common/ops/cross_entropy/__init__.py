"""Cross-entropy of masked tokens over the vocabulary, and whether each prediction is correct.

The word table is padded, so logits have more columns than there are words. Softmax and argmax ignore the padding. Rows
without a label (-1) have loss 0 and gradient 0 and are not correct, whatever their logits are.

If the vocabulary is sharded over ranks, use the two functions of :data:`OF_A_PART`, which have no autograd. The first
returns the log-sum-exp of the words of a rank, and the caller merges those of all ranks; with the result, the second
returns the gradient of the logits of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen

NO_LABEL = -1
"""Label of rows that have no label; the loss ignores them."""


def masked_cross_entropy_reference(
    logits_MV: Tensor, labels_M: Tensor, vocabulary: int, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each row, and whether the prediction is correct.

    Args:
        logits_MV: logits; columns from ``vocabulary`` on are padding.
        labels_M: int32 or int64, 0 ... vocabulary - 1 or ``NO_LABEL``.
        vocabulary: number of words.
        inplace: whether the gradient may overwrite the logits; the reference ignores this.

    Returns:
        Losses (M,): ``-log softmax(logits)[label]``, fp32 (fp64 for fp64 logits), 0 without a label; and correct (M,)
        bool: whether the label is the first of the largest logits, False without a label; it has no gradient.
    """
    labels_M = labels_M.long()
    # rows without a label may contain NaN, and 0 * NaN would reach the gradient
    words = widen(logits_MV[:, :vocabulary]).masked_fill((labels_M == NO_LABEL).unsqueeze(1), 0.0)
    losses_M = F.cross_entropy(words, labels_M, ignore_index=NO_LABEL, reduction="none")
    return losses_M, words.detach().argmax(1) == labels_M


class OfAPart(NamedTuple):
    """The functions for logits of a part of the vocabulary, without autograd.

    See :func:`log_sum_exp_reference` and :func:`gradient_reference`.
    """

    log_sum_exp: Callable[[Tensor, Tensor, int], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@torch.no_grad()
def log_sum_exp_reference(logits_MV: Tensor, labels_M: Tensor, vocabulary: int) -> Tensor:
    """Return the log-sum-exp of each row, (M,), fp32 (fp64 for fp64 logits).

    Args:
        logits_MV: contiguous; columns from ``vocabulary`` on are padding.
        labels_M: ``NO_LABEL`` for rows whose result is not needed; all other values are equivalent.
        vocabulary: number of words on this rank; for 0 the result is -inf.
    """
    words = widen(logits_MV[:, :vocabulary])
    return words.logsumexp(1) if vocabulary else words.new_full((len(words),), float("-inf"))


@torch.no_grad()
def gradient_reference(
    d_losses_M: Tensor, logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, vocabulary: int
) -> Tensor:
    """Overwrite the logits with their gradient, ``d_loss * (exp(logit - lse) - one-hot)``, and return them.

    Args:
        d_losses_M: gradient of the losses, dtype of ``lse_M``.
        logits_MV: contiguous; columns from ``vocabulary`` on are padding, and get 0.
        labels_M: integers; ``NO_LABEL`` for rows whose gradient is 0, and V for rows whose label is on another rank.
        lse_M: log-sum-exp over the words of all ranks; any value in rows without a label.
        vocabulary: number of words on this rank.
    """
    words = widen(logits_MV[:, :vocabulary])
    columns = torch.arange(vocabulary, device=logits_MV.device)
    chances = (words - lse_M.unsqueeze(1)).exp() - (columns == labels_M.unsqueeze(1)).to(words.dtype)
    scored = (labels_M != NO_LABEL).unsqueeze(1)
    logits_MV[:, :vocabulary] = torch.where(scored, chances * d_losses_M.unsqueeze(1), 0.0).to(logits_MV.dtype)
    logits_MV[:, vocabulary:] = 0.0
    return logits_MV


CROSS_ENTROPY = Operation(
    "cross_entropy",
    masked_cross_entropy_reference,
    {
        "triton": triton_kernels("common.ops.cross_entropy.triton:masked_cross_entropy"),
    },
    kernel_names=(("cross-entropy", r"^cross_entropy_"),),
    cases="common.ops.cross_entropy.cases",
)
"""Signature: ``masked_cross_entropy(logits_MV, labels_M, vocabulary, inplace=False)``."""

OF_A_PART = Operation(
    "cross_entropy_of_a_part",
    OfAPart(log_sum_exp_reference, gradient_reference),
    {
        "triton": triton_kernels("common.ops.cross_entropy.triton"),
    },
    cases="common.ops.cross_entropy.cases:OF_A_PART",
)
"""Functions: those of :class:`OfAPart`."""
