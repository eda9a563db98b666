"""R-GAT's evaluation: top-1 accuracy over all evaluation seeds, each once.

Rules: neighbours are sampled with the fanouts of training, without dropout; what is counted is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.data import Sources
from benchmarks.rgat.model import RGAT
from benchmarks.rgat.sampling import BlockSampler
from benchmarks.rgat.seeds import EvaluationSeeds
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, check_whole_set
from common.evaluation.forward import ForwardPass
from common.evaluation.model_weights import evaluating


class RightAnswers(Scorer):
    """Right answers over the seeds of the set."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Accuracy: right answers over seeds."""
        values = predictions.values
        check_whole_set(values["seeds"], values["expected"], "seeds")
        return {"accuracy": values["right"] / values["seeds"], "eval_samples": values["seeds"]}


class NodeClassification(Evaluation):
    """Counts right answers as integers, summed over the ranks.

    The graph of a batch's shape is captured when the data are open: only they tell how large it is.

    Args:
        model: the network.
        example: shape and tensors of a made-up batch, for warm-up.
        open_sources: opens graph, features and this rank's seeds under a folder.
        batches, sigma: how room is found (:class:`benchmarks.rgat.config.ReaderConfig`).
        layout: the ranks that share the evaluation seeds.
        capture: replay the forward pass as a CUDA graph.
    """

    def __init__(
        self,
        model: RGAT,
        example: tuple[BlockShape, dict[str, Tensor]],
        open_sources: Callable[[Path], tuple[Sources, EvaluationSeeds]],
        batches: int,
        sigma: float,
        layout: Layout,
        capture: bool,
    ) -> None:
        self.scorer = RightAnswers()
        self._model, self._open_sources, self._capture, self._layout = model, open_sources, capture, layout
        self._batches, self._sigma = batches, sigma
        self._group = layout.group("dp")
        self._counts = Counts(layout, ("right", "seeds"))
        self._shape, inputs = example
        self._forward = self._pass(inputs)
        self._opened: tuple[Sources, EvaluationSeeds, BlockSampler] | None = None

    def _pass(self, inputs: dict[str, Tensor]) -> ForwardPass[None]:
        clones = {name: tensor.clone() for name, tensor in inputs.items()}
        return ForwardPass(self._model, lambda batch: self._count(self._shape, batch), clones, self._capture)

    def warm_up(self) -> None:
        """Forward passes on a made-up block. Collective."""
        self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Open graph and features, find out how large a batch becomes, and capture it. Collective."""
        sources, seeds = self._open_sources(root)
        self._forward.close()
        self._shape = sources.room(seeds.batch, seeds.measuring(self._batches), self._sigma, self._group)
        sampler = sources.sampler(self._shape)
        self._opened = sources, seeds, sampler
        self._forward = self._pass(sources.example(self._shape, next(seeds.batches())))
        self._forward.warm_up()

    def predict(self, weights: Weights) -> Predictions:
        """Count right answers and seeds over all ranks. Collective."""
        assert self._opened is not None, "open_data comes first"
        sources, seeds, sampler = self._opened
        with evaluating(self._model, weights):
            self._counts.clear()
            for shape, tensors in sources.tensors(sampler, seeds.batches()):
                if shape == self._shape:
                    self._forward(tensors)
                else:
                    self._count(shape, tensors)
        return Predictions({**self._counts.totals(), "expected": len(seeds.labelled)})

    def close(self) -> None:
        """Free the graph."""
        self._forward.close()

    def _count(self, shape: BlockShape, batch: dict[str, Tensor]) -> None:
        with torch.no_grad():
            logits_BC = self._model(batch["features"], Block.of(shape, batch), batch["seed"])
        label_B = batch["label"]
        real_B = label_B >= 0
        self._counts.add(((logits_BC.argmax(1) == label_B) & real_B).sum(), real_B.sum())
