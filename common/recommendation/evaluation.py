"""Evaluation of click models: the area under the ROC curve over all samples.

All ranks predict, because the tables are sharded over all of them, with a separate batch size and a captured forward
pass. For each sample they store only its ranking key, 4 bytes. The first rank gathers and sorts the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.evaluation.counts import check_whole_set
from common.evaluation.forward import ForwardPass
from common.recommendation.auc import PADDING, Ranking, gather_keys, rank, ranking_keys
from common.recommendation.criteo.evaluation_rows import ClickEvaluationRows


class AreaUnderCurve(Scorer):
    """Scorer that computes the area under the ROC curve from counted pairs."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the area, as ``auc``.

        Raises:
            RuntimeError: not all samples were evaluated.
            DataError: all samples have one label.
        """
        values = predictions.values
        check_whole_set(values["positives"] + values["negatives"], values["expected"], "samples")
        area = Ranking(values["positives"], values["negatives"], values["doubled_wins"]).area
        return {"auc": area, "eval_samples": values["expected"]}


class ClickRanking(Evaluation):
    """Ranks samples by the predicted probability of a click.

    Args:
        model: the network, which uses the given weights during an evaluation.
        logits: maps a batch's tensors ``dense`` (B, D) and ``ids`` (B, L) to logits (B,); collective over the ranks
            of ``layout``, capturable.
        example: synthetic tensors of a batch: these, and ``label`` (B,) and ``count``, 0-d, the number of samples.
        open_source: opens this rank's batches in a folder.
        capture: replay the forward pass as a CUDA graph.
        checked: context around the forward passes of an evaluation; raises at its end if their results are invalid.
    """

    def __init__(
        self,
        model: nn.Module,
        logits: Callable[[Mapping[str, Tensor]], Tensor],
        example: dict[str, Tensor],
        open_source: Callable[[Path], ClickEvaluationRows],
        layout: Layout,
        capture: bool,
        checked: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.scorer = AreaUnderCurve()
        self._checked = checked
        self._logits, self._open_source, self._group = logits, open_source, layout.group("dp")
        self._forward = ForwardPass(model, self._rank_batch, example, capture)
        self._source: ClickEvaluationRows | None = None
        self._keys_NB = torch.empty((0, len(example["label"])), dtype=torch.int32, device=layout.device)

    def warm_up(self) -> None:
        """Run the forward pass on synthetic samples, and a sort. Collective."""
        keys_B = self._forward.warm_up()
        every = gather_keys(keys_B, self._group)
        if every is not None:
            rank(every)

    def open_data(self, root: Path) -> None:
        """Open this rank's batches, and allocate memory for their keys."""
        self._source = self._open_source(root)
        self._keys_NB = self._keys_NB.new_full((len(self._source), self._keys_NB.shape[1]), PADDING)

    def predict(self, weights: Weights) -> Predictions | None:
        """Predict all samples; return the counts of pairs on the first rank, None on the others. Collective.

        Raises:
            SuiteError: a prediction is not a number, or ``checked`` raised.
        """
        assert self._source is not None, "open_data comes first"
        with self._checked(), self._forward.evaluating(weights):
            for key_B, batch in zip(self._keys_NB, self._source, strict=True):
                key_B.copy_(self._forward(batch.tensors))
        every = gather_keys(self._keys_NB.view(-1), self._group)
        if every is None:
            return None
        found = rank(every)
        return Predictions(
            {
                "positives": found.positives,
                "negatives": found.negatives,
                "doubled_wins": found.doubled_wins,
                "expected": self._source.eval_samples,
            }
        )

    def close(self) -> None:
        """Free the graph and close the batches."""
        self._forward.close()
        if self._source is not None:
            self._source.close()
            self._source = None

    def _rank_batch(self, batch: dict[str, Tensor]) -> Tensor:
        return ranking_keys(self._logits(batch), batch["label"], batch["count"])
