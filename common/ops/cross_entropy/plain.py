"""The plain version of :mod:`common.ops.cross_entropy`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen

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
