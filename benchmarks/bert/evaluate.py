"""BERT's evaluation: masked-language-model accuracy over exactly the evaluation set.

Rules: all 10,000 sequences each time, dropout off; right answers over all masked tokens of the whole set, not a mean of
batches (MLPerf training_rules, benchmark table; the reference's ``run_pretraining``).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.bert.collate import evaluation_shape, example, example_lengths
from benchmarks.bert.data import DataSettings, EvaluationData, open_evaluation
from common.capture import capturing
from common.distributed.layout import Layout
from common.evaluation.base import Evaluation, Predictions, Weights
from common.evaluation.network import evaluating, take_over


class MaskedLmAccuracy(Evaluation):
    """Counts right answers, summed over the ranks once an evaluation.

    The network that trains can be the one that is evaluated: there is no second copy of its weights, and it is in
    training mode again afterwards. A network of its own takes over the weights that are evaluated.

    Args:
        model: called with the tensors of a batch (:mod:`benchmarks.bert.collate`) it returns ``correct`` and
            ``masked_lm_losses``, both [M]; in evaluation mode it drops nothing out.
        settings: form of the sequences, and the room of a batch.
        layout: the ranks that share the evaluation set.
        capture: replay the forward pass as a CUDA graph.
    """

    def __init__(self, model: nn.Module, settings: DataSettings, layout: Layout, capture: bool) -> None:
        self._model = model
        self._settings = settings
        self._layout = layout
        self._data: EvaluationData | None = None
        self._group = layout.group("dp")
        self._device = layout.device
        shape = evaluation_shape(settings.facts, settings.reader.eval_rows)
        made_up = example(shape, settings.facts.vocabulary, example_lengths(shape))
        self._input = {name: tensor.to(layout.device) for name, tensor in made_up.items()}
        # Right answers, masked tokens, their loss, sequences: float64 counts exactly and is one all-reduce.
        self._sums = torch.zeros(4, dtype=torch.float64, device=layout.device)
        self._capture = capture and layout.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kept: list[dict[str, Tensor]] = []

    def warm_up(self) -> None:
        """Forward passes on made-up sequences, the last of them recorded on a GPU."""
        with evaluating(self._model):
            for _ in range(2):
                self._add()
            if self._capture:
                self._graph = torch.cuda.CUDAGraph()
                stream = torch.cuda.current_stream()
                with capturing(self._graph, stream):
                    self._add()
        if self._group is not None:
            dist.all_reduce(self._sums, group=self._group)
        self._sums.zero_()

    def open_data(self, root: Path) -> None:
        """Read this rank's part of the evaluation set."""
        self._data = open_evaluation(root, self._settings, self._layout)

    def predict(self, weights: Weights) -> Predictions:
        """Count right answers, masked tokens and sequences over all ranks, and add up the losses.

        Batches stay on the device from the first evaluation on.
        """
        assert self._data is not None, "open_data comes first"
        if not self._kept:
            self._kept = [
                {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
                for batch in self._data.batches
            ]
        with evaluating(self._model):
            take_over(self._model, weights)
            self._sums.zero_()
            for batch in self._kept:
                torch._foreach_copy_(list(self._input.values()), [batch[name] for name in self._input])
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self._add()
        if self._group is not None:
            dist.all_reduce(self._sums, group=self._group)
        correct, masked, loss, sequences = self._sums.tolist()
        return Predictions(
            {
                "correct": round(correct),
                "masked": round(masked),
                "loss": loss,
                "sequences": round(sequences),
                "expected": self._data.eval_samples,
            }
        )

    @staticmethod
    def score(predictions: Predictions) -> dict[str, float]:
        """Accuracy and mean loss over all masked tokens."""
        values = predictions.values
        if values["sequences"] != values["expected"]:
            raise RuntimeError(f"{values['sequences']} sequences were evaluated, the set has {values['expected']}")
        return {
            "masked_lm_accuracy": values["correct"] / values["masked"],
            "masked_lm_loss": values["loss"] / values["masked"],
            "eval_samples": values["sequences"],
        }

    def close(self) -> None:
        """Free the graph and forget the sequences."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
        self._kept, self._data = [], None

    def _add(self) -> None:
        said = self._model(self._input)
        real_M = self._input["masked_labels"] >= 0
        correct_M, losses_M = said.correct & real_M, said.masked_lm_losses.double().where(real_M, 0.0)
        present_S = self._input["lengths"] > 0
        self._sums += torch.stack([correct_M.sum(), real_M.sum(), losses_M.sum(), present_S.sum()])
