"""Evaluation that iterates over its source once and accumulates counts of every batch on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor, nn

from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.data.batches import EvalSource
from common.evaluation.counts import Counts
from common.evaluation.forward import ForwardPass


class CountedEvaluation(Evaluation):
    """Evaluation by counts: predicts totals over the ranks, and ``expected``, the size of the evaluation set.

    Args:
        scorer: computes the metrics from the totals.
        model: the network in training.
        count: adds the counts of a batch's tensors to ``counts``; must allow CUDA graph capture.
        counts: counters over the ranks that share the evaluation set.
        example: batch on the device, for warm-up.
        open_source: returns this replica's batches from the data folder.
        capture: whether to capture the forward pass as a CUDA graph.
        within: context around each evaluation and the warm-up; its operations are not part of the graph.
    """

    def __init__(
        self,
        scorer: Scorer,
        model: nn.Module,
        count: Callable[[dict[str, Tensor]], None],
        counts: Counts,
        example: dict[str, Tensor],
        open_source: Callable[[Path], EvalSource],
        capture: bool,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.scorer = scorer
        self._counts, self._open_source, self._within = counts, open_source, within
        self._forward = ForwardPass(model, count, example, capture)
        self._source: EvalSource | None = None

    def warm_up(self) -> None:
        """Run a pass over the example batch."""
        with self._within():
            self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Open this replica's batches."""
        self._source = self._open_source(root)

    def predict(self, weights: Weights) -> Predictions:
        """Count over the whole evaluation set and sum over all ranks."""
        assert self._source is not None, "open_data comes first"
        with self._forward.evaluating(weights), self._within():
            self._counts.clear()
            for batch in self._source:
                self._forward(batch.tensors)
        return Predictions({**self._counts.totals(), "expected": self._source.eval_samples})

    def close(self) -> None:
        """Release the graph and close the source."""
        self._forward.close()
        if self._source is not None:
            self._source.close()
        self._source = None
