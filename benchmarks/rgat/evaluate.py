"""R-GAT's evaluation: top-1 accuracy over all evaluation seeds, each counted once.

As the rules require, neighbours are sampled with the fanouts of training, and dropout is off. Counts are summed over
the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.rgat.data import EvaluationSeeds, GraphData
from benchmarks.rgat.graph import BlockShape, SampledBlock
from benchmarks.rgat.model import RGAT
from benchmarks.rgat.sampling import BlockSampler
from common.contract.evaluation import Evaluation, Predictions, Weights
from common.distributed.layout import Layout
from common.evaluation.counts import Counts, MeanScorer
from common.evaluation.forward import ForwardPass, evaluating


class NodeClassification(Evaluation):
    """Evaluation that counts correct predictions as integers, summed over the ranks.

    The CUDA graph is captured again when the data are open, because only the data determine the batch's capacities.

    Args:
        example: shape and tensors of a synthetic batch, for warm-up.
        open_sources: opens graph, features and this rank's seeds in a folder.
        batches, sigma: ``capacity_batches`` and ``capacity_sigma`` of :class:`benchmarks.rgat.config.ReaderConfig`.
        capture: whether to replay the forward pass as a CUDA graph.
    """

    def __init__(
        self,
        model: RGAT,
        example: tuple[BlockShape, dict[str, Tensor]],
        open_sources: Callable[[Path], tuple[GraphData, EvaluationSeeds]],
        batches: int,
        sigma: float,
        layout: Layout,
        capture: bool,
    ) -> None:
        self.scorer = MeanScorer("accuracy", "right", "seeds")
        self._model, self._open_sources, self._capture, self._layout = model, open_sources, capture, layout
        self._capacity_batches, self._sigma = batches, sigma
        self._group = layout.group("dp")
        self._counts = Counts(layout, ("right", "seeds"))
        self._shape, inputs = example
        self._forward = self._pass(inputs)
        self._opened: tuple[GraphData, EvaluationSeeds, BlockSampler] | None = None

    def _pass(self, inputs: dict[str, Tensor]) -> ForwardPass[None]:
        clones = {name: tensor.clone() for name, tensor in inputs.items()}
        return ForwardPass(self._model, lambda batch: self._count(self._shape, batch), clones, self._capture)

    def warm_up(self) -> None:
        """Run forward passes on a synthetic block. Collective."""
        self._forward.warm_up()
        self._counts.warm_up()

    def open_data(self, root: Path) -> None:
        """Open graph and features, estimate the capacities of a batch, and capture its forward pass. Collective."""
        sources, seeds = self._open_sources(root)
        self._forward.close()
        self._shape = sources.capacities(
            seeds.batch, seeds.capacity_batches(self._capacity_batches), self._sigma, self._group
        )
        sampler = sources.sampler(self._shape)
        self._opened = sources, seeds, sampler
        self._forward = self._pass(sources.example(self._shape, next(seeds.batches())))
        self._forward.warm_up()

    def predict(self, weights: Weights) -> Predictions:
        """Return the ``right`` predictions and ``seeds`` of all ranks, and ``expected`` seeds. Collective."""
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
        """Free the CUDA graph."""
        self._forward.close()

    def _count(self, shape: BlockShape, batch: dict[str, Tensor]) -> None:
        with torch.no_grad():
            logits_BC = self._model(batch["features"], SampledBlock.of(shape, batch), batch["seed"])
        label_B = batch["label"]
        real_B = label_B >= 0
        self._counts.add(((logits_BC.argmax(1) == label_B) & real_B).sum(), real_B.sum())
