"""Evaluation metric: the mean loss of the scored tokens in each row, averaged over rows without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from benchmarks.llama2_70b_lora.loss import means_of_rows
from common.contract.evaluation import Predictions, Scorer
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation, Counts, check_whole_set


class RowMeans(Scorer):
    """Scorer that computes the mean over the rows that have scored tokens."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the mean loss over the rows with scored tokens, and the number of all rows."""
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
