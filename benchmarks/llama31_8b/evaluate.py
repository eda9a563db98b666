"""The metric: log perplexity, the mean cross-entropy of all scored tokens of the evaluation set, in nats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, check_whole_set
from common.evaluation.forward import ForwardPass


class TokenMean(Scorer):
    """The mean over the tokens: a row with more scored tokens weighs more."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """The sum of losses by the number of tokens."""
        values = predictions.values
        check_whole_set(values["rows"], values["expected"], "rows")
        return {"log_perplexity": values["loss"] / values["tokens"], "eval_samples": values["rows"]}


class LogPerplexity(Evaluation):
    """Loss of the network that trains on the evaluation rows; sums are in float64.

    Args:
        model: the network.
        losses: from a batch's tensors, losses (T,) of its tokens on this rank, without gradients, 0 where nothing is
            scored, and whether each is scored.
        example: a batch on the device, for warm-up.
        layout: the ranks that share the evaluation set; those of ``cp`` have parts of the same rows.
        open_rows: the rows of this rank from the folder of the data.
        capture: replay the forward pass as a CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
        example: dict[str, Tensor],
        layout: Layout,
        open_rows: Callable[[Path], EvalSource],
        capture: bool,
    ) -> None:
        self.scorer = TokenMean()
        self._losses, self._open_rows = losses, open_rows
        self._counts_rows = layout.coordinate("cp") == 0  # all ranks of cp see every row
        self._counts = Counts(layout, ("rows", "tokens"), ("loss",), axes=("dp", "cp"))
        self._forward = ForwardPass(model, self._count, example, capture)
        self._rows: EvalSource | None = None

    def warm_up(self) -> None:
        """A pass over the made-up batch."""
        self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Open this rank's rows."""
        self._rows = self._open_rows(root)

    def predict(self, weights: Weights) -> Predictions:
        """Add up losses and tokens over all ranks."""
        assert self._rows is not None, "open_data comes first"
        with self._forward.evaluating(weights):
            self._counts.clear()
            for batch in self._rows:
                self._forward(batch.tensors)
        return Predictions({**self._counts.totals(), "expected": self._rows.eval_samples})

    def close(self) -> None:
        """Free the graph and forget the rows."""
        self._forward.close()
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def _count(self, batch: dict[str, Tensor]) -> None:
        losses_T, scored_T = self._losses(batch)
        rows = batch["present"].sum() * self._counts_rows
        self._counts.add(rows, scored_T.sum(), losses_T.double().sum())
