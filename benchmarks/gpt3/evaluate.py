"""Evaluation metric: log perplexity, the mean cross-entropy of all labels of the evaluation set, in nats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from common.contract.evaluation import Predictions, Scorer
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counted import CountedEvaluation
from common.evaluation.counts import Counts, check_whole_set


class LabelMean(Scorer):
    """Scorer that computes the mean over all labels: rows with more labels have more weight."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the sum of losses divided by the number of labels, which the rules call samples."""
        values = predictions.values
        check_whole_set(values["rows"], values["expected"], "rows")
        return {"log_perplexity": values["loss"] / values["tokens"], "eval_samples": values["tokens"]}


def log_perplexity(
    model: nn.Module,
    losses: Callable[[dict[str, Tensor]], Iterable[tuple[Tensor, Tensor]]],
    example: dict[str, Tensor],
    layout: Layout,
    open_rows: Callable[[Path], EvalSource],
    capture: bool,
    within: Callable[[], AbstractContextManager[None]],
) -> CountedEvaluation:
    """Return the evaluation of the model on the evaluation rows, with sums in float64.

    Args:
        model: this rank's part of the network.
        losses: returns, for each micro-batch of a batch, losses (T,) without gradients, 0 where not scored, and a mask
            of scored tokens. Collective over the stages of ``pp``; only the last stage gets losses.
        example: a batch on the device, for warm-up.
        layout: ranks that share the evaluation set.
        open_rows: opens the rows of this rank, given the data folder.
        capture: replay the forward pass as a CUDA graph.
        within: returns a context for all passes of an evaluation.
    """
    last = layout.coordinate("pp") == layout.size("pp") - 1  # all stages read every row, so only the last counts
    counts = Counts(layout, ("rows", "tokens"), ("loss",), axes=("pp", "dp"))

    def count(batch: dict[str, Tensor]) -> None:
        rows = batch["present"].sum() * last
        tokens, loss = torch.zeros_like(rows), torch.zeros((), dtype=torch.float64, device=rows.device)
        for losses_T, scored_T in losses(batch):
            tokens, loss = tokens + scored_T.sum(), loss + losses_T.double().sum()
        counts.add(rows, tokens, loss)

    return CountedEvaluation(LabelMean(), model, count, counts, example, open_rows, capture, within)
