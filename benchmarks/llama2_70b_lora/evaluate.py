"""Loss and metric of the rules: the mean loss of the scored tokens in each row, averaged over rows without weights.

A row with ten scored tokens has the same weight as one with a thousand. The tokens of a row may be on several ranks.
(The reference implementation trains on one row at a time; NVIDIA divides the sum of each row by its number of scored
tokens.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.contract.evaluation import Predictions, Scorer
from common.data.batches import EvalSource
from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.vocabulary import NOT_SCORED
from common.evaluation.counts import CountedEvaluation, Counts, check_whole_set
from common.language.head import LossHead
from common.language.stage import Objective
from common.step.train_step import Losses


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


@dataclass(frozen=True)
class MeanOverRows(Objective):
    """The mean over rows of the mean loss in each row; a batch has ``tokens`` and ``labels``, (B, L) on this rank.

    Attributes:
        split: how rows are split over the ranks of cp.
    """

    split: ContextSplit

    def tokens(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the input tokens (B, L) of this rank."""
        return tensors["tokens"]

    def labels(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the labels (T,)."""
        return tensors["labels"].flatten()

    def loss(self, head: LossHead, hidden_sE: Tensor, tensors: dict[str, Tensor]) -> Losses:
        """Return this rank's part of the mean as the loss, and the mean as the metric. Collective over cp."""
        losses_T = head.losses(hidden_sE, self.labels(tensors))
        part, whole = training_loss(losses_T, tensors["labels"], self.split)
        return Losses(part, {"loss": whole})


def means_of_rows(losses_T: Tensor, labels_BS: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the mean loss of each row (B,), float64, 0 without scored tokens; and whether it has scored tokens, bool.

    Args:
        group: ranks that share the rows; None for a single rank.
    """
    sums_B, counts_B = row_sums(losses_T, labels_BS)
    both = torch.stack([sums_B.double(), counts_B.double()])
    if group is not None:
        dist.all_reduce(both, group=group)
    return both[0] / both[1].clamp(min=1.0), both[1] > 0


class RowMeans(Scorer):
    """Scorer that computes the mean over the rows that have scored tokens."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``eval_loss``, the mean over rows with scored tokens, and ``eval_samples``, the number of all rows."""
        values = predictions.values
        check_whole_set(values["rows"], values["expected"], "rows")
        return {"eval_loss": values["loss"] / values["scored_rows"], "eval_samples": values["rows"]}


def mean_of_rows(
    model: nn.Module,
    losses: Callable[[dict[str, Tensor]], Tensor],
    example: dict[str, Tensor],
    layout: Layout,
    open_rows: Callable[[Path], EvalSource],
    capture: bool,
) -> CountedEvaluation:
    """Return the evaluation of the model, without dropout; rows without scored tokens are ignored.

    Args:
        losses: returns the losses (T,) of the tokens in a batch, without gradients.
        example: a batch on the device, for warm-up.
        layout: ranks that share the evaluation set; those of ``cp`` and ``tp`` share rows.
        open_rows: opens the rows of this rank, given the data folder.
        capture: replay the forward pass as a CUDA graph.
    """
    sharers = layout.group("cp")
    counts = Counts(layout, ("rows", "scored_rows"), ("loss",))

    def count(batch: dict[str, Tensor]) -> None:
        means_B, scored_B = means_of_rows(losses(batch), batch["labels"], sharers)
        counts.add(batch["present"].sum(), scored_B.sum(), means_B.sum())

    return CountedEvaluation(RowMeans(), model, count, counts, example, open_rows, capture)
