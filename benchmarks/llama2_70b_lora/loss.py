"""The loss of a row: the mean over its scored tokens, wherever these lie.

The rules' loss and metric are means of rows, not of tokens: a row with ten scored tokens weighs as much as one with a
thousand (the reference's trainer takes one row at a time; NVIDIA's divides each row's sum by its own mask).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.context_parallel.split import ContextSplit
from common.distributed.tensor_parallel.cross_entropy import NOT_SCORED


def row_sums(losses_T: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the scored tokens' losses, and how many these are, (B,) each, of this rank's part of every row."""
    scored_BS = labels_BS != NOT_SCORED
    return losses_T.view(labels_BS.shape).where(scored_BS, 0.0).sum(1), scored_BS.sum(1)


def training_loss(losses_T: Tensor, labels_BS: Tensor, split: ContextSplit) -> tuple[Tensor, Tensor]:
    """This rank's part of the mean over the rows of a micro-batch of each row's mean, and the whole, detached.

    Args:
        losses_T: of this rank's tokens, row after row.
        labels_BS: int, ``NOT_SCORED`` where nothing counts. A row without any scored token adds 0.
        split: of the rows over the ranks of cp, over which the parts and their gradients add up.
    """
    sums_B, counts_B = row_sums(losses_T, labels_BS)
    part = (sums_B / split.scored(counts_B).clamp(min=1)).mean()
    whole = part.detach().clone()
    if split.group is not None:
        dist.all_reduce(whole, group=split.group)
    return part, whole


def means_of_rows(losses_T: Tensor, labels_BS: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Mean of each row (B,), float64, 0 where nothing is scored; and whether anything is, bool."""
    sums_B, counts_B = row_sums(losses_T, labels_BS)
    both = torch.stack([sums_B.double(), counts_B.double()])
    if group is not None:
        dist.all_reduce(both, group=group)
    return both[0] / both[1].clamp(min=1.0), both[1] > 0
