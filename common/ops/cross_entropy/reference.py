"""The reference of :mod:`common.ops.cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen

NO_LABEL = -1
"""Label of rows that do not count."""


def masked_cross_entropy_reference(
    logits_MV: Tensor, labels_M: Tensor, vocabulary: int, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Reference implementation.

    Args:
        logits_MV: logits; columns from ``vocabulary`` on are padding.
        labels_M: int32 or int64, 0 ... vocabulary - 1 or ``NO_LABEL``.
        vocabulary: words.
        inplace: the caller has no more use for the logits, so that their memory may hold the gradient; the
            reference ignores this.

    Returns:
        losses (M,): ``-log softmax(logits)[label]``, fp32 (fp64 for fp64 logits); and correct (M,): whether the label
        is the first of the largest logits, bool and without gradient.
    """
    labels_M = labels_M.long()
    # logits of rows without a label may be anything; 0 * NaN would reach the gradient
    words = widen(logits_MV[:, :vocabulary]).masked_fill((labels_M == NO_LABEL).unsqueeze(1), 0.0)
    losses_M = F.cross_entropy(words, labels_M, ignore_index=NO_LABEL, reduction="none")
    return losses_M, words.detach().argmax(1) == labels_M


class OfAPart(NamedTuple):
    """The functions for logits of a part of the words, without autograd.

    See :func:`log_sum_exp_reference` and :func:`gradient_reference`.
    """

    log_sum_exp: Callable[[Tensor, Tensor, int], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@torch.no_grad()
def log_sum_exp_reference(logits_MV: Tensor, labels_M: Tensor, vocabulary: int) -> Tensor:
    """The logarithm of the sum of exponentials of each row, (M,), fp32 (fp64 for fp64 logits).

    Args:
        logits_MV: contiguous; columns from ``vocabulary`` on are padding.
        labels_M: ``NO_LABEL`` where nobody wants to know; what else is in them does not matter.
        vocabulary: words; without any the result is -inf.
    """
    words = widen(logits_MV[:, :vocabulary])
    return words.logsumexp(1) if vocabulary else words.new_full((len(words),), float("-inf"))


@torch.no_grad()
def gradient_reference(
    d_losses_M: Tensor, logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, vocabulary: int
) -> Tensor:
    """The gradient of the logits, which takes their place: ``d_loss * (exp(logit - lse) - one-hot)``.

    Args:
        d_losses_M: gradient of the losses, dtype of ``lse_M``.
        logits_MV: contiguous; columns from ``vocabulary`` on are padding, and get 0.
        labels_M: integers; ``NO_LABEL`` for rows that get 0, and the number of columns for those whose label is
            elsewhere.
        lse_M: over all words; anything in rows without a label.
        vocabulary: words.
    """
    words = widen(logits_MV[:, :vocabulary])
    columns = torch.arange(vocabulary, device=logits_MV.device)
    chances = (words - lse_M.unsqueeze(1)).exp() - (columns == labels_M.unsqueeze(1)).to(words.dtype)
    scored = (labels_M != NO_LABEL).unsqueeze(1)
    logits_MV[:, :vocabulary] = torch.where(scored, chances * d_losses_M.unsqueeze(1), 0.0).to(logits_MV.dtype)
    logits_MV[:, vocabulary:] = 0.0
    return logits_MV
