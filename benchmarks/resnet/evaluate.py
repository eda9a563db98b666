"""Evaluation of ResNet-50: top-1 accuracy over exactly the validation set.

The rules require every validation picture once, one central crop, and the current weights with batch-norm statistics
averaged over the ranks (MLPerf training_rules, benchmark table).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from common.contract.evaluation import Evaluation, Predictions, Weights
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, MeanScorer
from common.evaluation.forward import ForwardPass


class TopOne(Evaluation):
    """Top-1 evaluation that counts correct answers as integers and sums them over the ranks.

    Args:
        model: maps pictures (N, C, H, W) to logits (N, K).
        open_source: opens this rank's shard of the evaluation data in a folder.
        example: pictures (N, C, H, W) for warm-up, in the shape of an evaluation batch.
        capture: replay the forward pass as a CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        open_source: Callable[[Path], EvalSource],
        example: Tensor,
        layout: Layout,
        capture: bool,
    ) -> None:
        self.scorer = MeanScorer("accuracy", "right", "pictures")
        self._model = model
        self._open_source = open_source
        self._source: EvalSource | None = None
        self._device = layout.device
        label_N = torch.full((len(example),), -1, dtype=torch.int64, device=layout.device)
        self._counts = Counts(layout, ("right", "pictures"))
        self._forward = ForwardPass(model, self._count, {"image": example.clone(), "label": label_N}, capture)

    def warm_up(self) -> None:
        """Run forward passes on synthetic pictures."""
        self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Open this rank's shard of the validation set."""
        self._source = self._open_source(root)

    def predict(self, weights: Weights) -> Predictions:
        """Return the ``right`` answers and ``pictures`` of all ranks, and the ``expected`` number of pictures."""
        assert self._source is not None, "open_data comes first"
        with self._forward.evaluating(weights):
            self._counts.clear()
            for host in self._source:
                batch = {name: host.tensors[name].to(self._device, non_blocking=True) for name in ("image", "label")}
                self._forward(batch)
        return Predictions({**self._counts.totals(), "expected": self._source.eval_samples})

    def close(self) -> None:
        """Free the CUDA graph, and close the reader."""
        self._forward.close()
        if self._source is not None:
            self._source.close()

    def _count(self, batch: dict[str, Tensor]) -> None:
        answer_N = self._model(batch["image"]).argmax(dim=1)
        real_N = batch["label"] >= 0
        self._counts.add(((answer_N == batch["label"]) & real_N).sum(), real_N.sum())
