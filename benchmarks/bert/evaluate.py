"""Evaluation of BERT: masked-language-model accuracy over the whole evaluation set.

The rules require all 10,000 sequences at each evaluation, without dropout. The score is the number of correct answers
divided by the number of masked tokens of the whole set, not a mean over batches (MLPerf training_rules, benchmark
table; ``run_pretraining`` in the reference implementation).
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from benchmarks.bert.collate import evaluation_shape, example, example_lengths
from benchmarks.bert.data import BertDataSettings, EvaluationData, open_evaluation
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, check_whole_set
from common.evaluation.forward import ForwardPass


class TokenMeans(Scorer):
    """Scorer that computes accuracy and mean loss over all masked tokens of the set."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``masked_lm_accuracy``, ``masked_lm_loss``, and the number of sequences as ``eval_samples``."""
        values = predictions.values
        check_whole_set(values["sequences"], values["expected"], "sequences")
        return {
            "masked_lm_accuracy": values["correct"] / values["masked"],
            "masked_lm_loss": values["loss"] / values["masked"],
            "eval_samples": values["sequences"],
        }


class MaskedLmAccuracy(Evaluation):
    """Evaluation that counts correct answers and sums them over the ranks once per evaluation.

    It can use the model that is being trained: it needs no second copy of the weights, and restores the model's state.

    Args:
        model: takes the tensors of a batch (:mod:`benchmarks.bert.collate`) and returns an object with ``correct`` and
            ``masked_lm_losses``, both [M]; uses no dropout in evaluation mode.
        layout: ranks that share the evaluation set.
        capture: replay the forward pass as a CUDA graph.
    """

    def __init__(self, model: nn.Module, settings: BertDataSettings, layout: Layout, capture: bool) -> None:
        self.scorer = TokenMeans()
        self._model = model
        self._settings = settings
        self._layout = layout
        self._data: EvaluationData | None = None
        shape = evaluation_shape(settings.facts, settings.reader.eval_rows)
        example_batch = example(shape, settings.facts.vocabulary, example_lengths(shape))
        inputs = {name: tensor.to(layout.device) for name, tensor in example_batch.items()}
        self._counts = Counts(layout, ("correct", "masked", "sequences"), ("loss",))
        self._forward = ForwardPass(model, self._count, inputs, capture)
        self._kept: list[dict[str, Tensor]] = []

    def warm_up(self) -> None:
        """Run forward passes on synthetic sequences."""
        self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Read this rank's part of the evaluation set."""
        self._data = open_evaluation(root, self._settings, self._layout)

    def predict(self, weights: Weights) -> Predictions:
        """Return ``correct``, ``masked``, ``sequences`` and ``loss``, summed over all ranks, and ``expected``.

        The first call copies the batches to the device, where they stay.
        """
        assert self._data is not None, "open_data comes first"
        if not self._kept:
            self._kept = [
                {name: tensor.to(self._layout.device, non_blocking=True) for name, tensor in batch.items()}
                for batch in self._data.batches
            ]
        with self._forward.evaluating(weights):
            self._counts.clear()
            for batch in self._kept:
                self._forward(batch)
        return Predictions({**self._counts.totals(), "expected": self._data.eval_samples})

    def close(self) -> None:
        """Free the graph and the sequences."""
        self._forward.close()
        self._kept, self._data = [], None

    def _count(self, batch: dict[str, Tensor]) -> None:
        outputs = self._model(batch)
        real_M = batch["masked_labels"] >= 0
        correct_M, losses_M = outputs.correct & real_M, outputs.masked_lm_losses.double().where(real_M, 0.0)
        present_S = batch["lengths"] > 0
        self._counts.add(correct_M.sum(), real_M.sum(), present_S.sum(), losses_M.sum())
