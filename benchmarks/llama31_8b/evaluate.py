"""Evaluation metric: log perplexity, the mean cross-entropy of all scored tokens of the evaluation set, in nats."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor, nn

from common.contract.evaluation import Predictions, Scorer
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counted import CountedEvaluation
from common.evaluation.counts import Counts, check_whole_set


class TokenMean(Scorer):
    """Scorer that computes the mean over all tokens: rows with more scored tokens have more weight."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the sum of losses divided by the number of tokens, and the number of rows."""
        values = predictions.values
        check_whole_set(values["rows"], values["expected"], "rows")
        return {"log_perplexity": values["loss"] / values["tokens"], "eval_samples": values["rows"]}


def log_perplexity(
    model: nn.Module,
    losses: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    example: dict[str, Tensor],
    layout: Layout,
    open_rows: Callable[[Path], EvalSource],
    capture: bool,
    within: Callable[[], AbstractContextManager[None]],
) -> CountedEvaluation:
    """Return the evaluation of the model on the evaluation rows, with sums in float64.

    Args:
        losses: returns the losses (T,) of this rank's tokens in a batch, without gradients, 0 where not scored, and a
            mask of scored tokens.
        example: a batch on the device, for warm-up.
        layout: ranks that share the evaluation set; those of ``cp`` have parts of the same rows.
        open_rows: opens the rows of this rank, given the data folder.
        capture: replay the forward pass as a CUDA graph.
        within: returns a context for all passes of an evaluation.
    """
    counts_rows = layout.coordinate("cp") == 0  # all ranks of cp see every row, so only one counts
    counts = Counts(layout, ("rows", "tokens"), ("loss",), axes=("dp", "cp"))

    def count(batch: dict[str, Tensor]) -> None:
        losses_T, scored_T = losses(batch)
        counts.add(batch["present"].sum() * counts_rows, scored_T.sum(), losses_T.double().sum())

    return CountedEvaluation(TokenMean(), model, count, counts, example, open_rows, capture, within)
