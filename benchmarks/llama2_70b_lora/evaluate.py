"""The metric: the unweighted mean, over the rows of the evaluation set, of the mean loss of a row's scored tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from benchmarks.llama2_70b_lora.data import EvaluationRows
from benchmarks.llama2_70b_lora.loss import means_of_rows
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, check_whole_set
from common.evaluation.forward import ForwardPass


class RowMeans(Scorer):
    """The mean over the rows that have scored tokens."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """The mean over the rows."""
        values = predictions.values
        check_whole_set(values["rows"], values["expected"], "rows")
        return {"eval_loss": values["loss"] / values["scored_rows"], "eval_samples": values["rows"]}


class MeanOfRows(Evaluation):
    """Loss of the network that trains, dropout off; rows without any scored token count for nothing.

    Args:
        model: the network.
        losses: the losses of a batch's tokens (T,), without gradients, from its tensors.
        example: a batch on the device, for warm-up.
        layout: the ranks that share the evaluation set; those of ``cp`` and ``tp`` share rows.
        open_rows: the rows of this rank from the folder of the data.
        capture: replay the forward pass as a CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[dict[str, Tensor]], Tensor],
        example: dict[str, Tensor],
        layout: Layout,
        open_rows: Callable[[Path], EvaluationRows],
        capture: bool,
    ) -> None:
        self.scorer = RowMeans()
        self._losses, self._layout, self._open_rows = losses, layout, open_rows
        self._sharers = layout.group("cp")
        self._counts = Counts(layout, ("rows", "scored_rows"), ("loss",))
        self._forward = ForwardPass(model, self._count, example, capture)
        self._rows: EvaluationRows | None = None

    def warm_up(self) -> None:
        """A pass over the made-up batch."""
        self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Read this rank's rows."""
        self._rows = self._open_rows(root)

    def predict(self, weights: Weights) -> Predictions:
        """Add up the rows' means over all ranks."""
        assert self._rows is not None, "open_data comes first"
        with self._forward.evaluating(weights):
            self._counts.clear()
            for batch in self._rows:
                self._forward(batch.tensors)
        return Predictions({**self._counts.totals(), "expected": self._rows.eval_samples})

    def close(self) -> None:
        """Free the graph and forget the rows."""
        self._forward.close()
        self._rows = None

    def _count(self, batch: dict[str, Tensor]) -> None:
        means_B, scored_B = means_of_rows(self._losses(batch), batch["labels"], self._sharers)
        self._counts.add(batch["present"].sum(), scored_B.sum(), means_B.sum())
