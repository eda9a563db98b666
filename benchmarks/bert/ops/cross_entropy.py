"""Cross-entropy of masked tokens over the vocabulary, and whether each is predicted right.

The word table is padded, so logits have more columns than words: those never count, neither in the softmax nor in the
argmax. Rows without a label (-1) have loss 0, gradient 0, and are not correct, whatever their logits are.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported, widen

NO_LABEL = -1
"""Label of rows that do not count."""


def masked_cross_entropy_torch(
    logits_MV: Tensor, labels_M: Tensor, vocabulary: int, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Plain version.

    Args:
        logits_MV: logits; columns from ``vocabulary`` on are padding.
        labels_M: int32 or int64, 0 ... vocabulary - 1 or ``NO_LABEL``.
        vocabulary: words.
        inplace: the caller has no more use for the logits, so that their memory may hold the gradient; the plain
            version makes no use of it.

    Returns:
        losses (M,): ``-log softmax(logits)[label]``, fp32 (fp64 for fp64 logits); and correct (M,): whether the label
        is the first of the largest logits, bool and without gradient.
    """
    labels_M = labels_M.long()
    # logits of rows without a label may be anything; 0 * NaN would reach the gradient
    words = widen(logits_MV[:, :vocabulary]).masked_fill((labels_M == NO_LABEL).unsqueeze(1), 0.0)
    losses_M = F.cross_entropy(words, labels_M, ignore_index=NO_LABEL, reduction="none")
    return losses_M, words.detach().argmax(1) == labels_M


def _masked_cross_entropy_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    # triton is imported only where it is used
    from benchmarks.bert.ops.cross_entropy_triton import masked_cross_entropy

    return masked_cross_entropy(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _masked_cross_entropy_triton, triton_unsupported),
    "torch": Implementation("torch", masked_cross_entropy_torch, always),
}
"""Signature: ``masked_cross_entropy(logits_MV, labels_M, vocabulary, inplace=False)``; a request's channels are V."""
