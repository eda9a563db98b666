"""The metric: mean absolute error over all parameters of exactly the evaluation set."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, check_whole_set
from common.evaluation.forward import ForwardPass
from tests.toy.data import eval_batches


class MeanError(Scorer):
    """Scorer that returns the mean over the set."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return the error per volume and parameter."""
        values = predictions.values
        check_whole_set(values["volumes"], values["expected"], "volumes")
        return {"mean_absolute_error": values["error"] / values["volumes"]}


class MeanAbsoluteError(Evaluation):
    """Evaluation of the training network on batches that stay on the device.

    Args:
        model: maps volumes (B, V) to estimates (B, P).
        example: a batch of volumes, for warm-up.
        parameters: P.
        layout: the ranks that share the evaluation set.
        capture: replay the forward pass as a CUDA graph.
    """

    def __init__(self, model: nn.Module, example: Tensor, parameters: int, layout: Layout, capture: bool) -> None:
        self.scorer = MeanError()
        self._model, self._layout, self._dtype = model, layout, example.dtype
        batch = len(example)
        target_BP = torch.zeros(batch, parameters, dtype=example.dtype, device=layout.device)
        inputs = {"volume": example, "parameters": target_BP, "weight": target_BP[:, 0].clone()}
        self._counts = Counts(layout, ("volumes",), ("error",))
        self._forward = ForwardPass(model, self._count, inputs, capture)
        self._batches: list[dict[str, Tensor]] = []
        self._size = 0

    def warm_up(self) -> None:
        """Run a forward pass on the example."""
        self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Copy this rank's volumes to the device."""
        self._size, batches = eval_batches(root, self._dtype, self._layout, len(self._forward.inputs["volume"]))
        self._batches = [{name: x.to(self._layout.device) for name, x in batch.items()} for batch in batches]

    def predict(self, weights: Weights) -> Predictions:
        """Return the sums of errors and volumes over all ranks."""
        with self._forward.evaluating(weights):
            self._counts.clear()
            for batch in self._batches:
                self._forward(batch)
        return Predictions({**self._counts.totals(), "expected": self._size})

    def close(self) -> None:
        """Free graph and volumes."""
        self._forward.close()
        self._batches = []

    def _count(self, batch: dict[str, Tensor]) -> None:
        error_B = (self._model(batch["volume"]) - batch["parameters"]).double().abs().mean(dim=1)
        self._counts.add(batch["weight"].double().sum(), (error_B * batch["weight"]).sum())
