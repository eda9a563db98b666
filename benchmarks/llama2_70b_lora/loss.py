"""Loss of a row: the mean over its scored tokens, which may be on several ranks.

Loss and metric of the rules are means over rows, not over tokens: a row with ten scored tokens has the same weight as
one with a thousand. (The reference implementation trains on one row at a time; NVIDIA divides the sum of each row by
its number of scored tokens.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.context_parallel.split import ContextSplit
from common.distributed.tensor_parallel.cross_entropy import NOT_SCORED


def row_sums(losses_T: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses and the number of scored tokens, (B,) each, in this rank's part of every row."""
    scored_BS = labels_BS != NOT_SCORED
    return losses_T.view(labels_BS.shape).where(scored_BS, 0.0).sum(1), scored_BS.sum(1)


def training_loss(losses_T: Tensor, labels_BS: Tensor, split: ContextSplit) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the mean over rows of each row's mean loss, and the whole mean, detached. Collective.

    Args:
        losses_T: losses of this rank's tokens, row after row.
        labels_BS: labels of this rank's tokens; ``NOT_SCORED`` is ignored. A row without scored tokens adds 0.
        split: split of the rows over the ranks of cp. The sum of the parts over these ranks is the whole mean.
    """
    sums_B, counts_B = row_sums(losses_T, labels_BS)
    part = (sums_B / split.scored(counts_B).clamp(min=1)).mean()
    whole = part.detach().clone()
    if split.group is not None:
        dist.all_reduce(whole, group=split.group)
    return part, whole


def means_of_rows(losses_T: Tensor, labels_BS: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the mean loss of each row (B,), float64, 0 without scored tokens; and whether it has scored tokens, bool.

    Args:
        losses_T, labels_BS: see :func:`training_loss`.
        group: ranks that share the rows; None for a single rank.
    """
    sums_B, counts_B = row_sums(losses_T, labels_BS)
    both = torch.stack([sums_B.double(), counts_B.double()])
    if group is not None:
        dist.all_reduce(both, group=group)
    return both[0] / both[1].clamp(min=1.0), both[1] > 0
