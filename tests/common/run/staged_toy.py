"""``mlperf-suite`` whose toy has its two layers on two stages; :mod:`tests.launch` starts its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks import WORKLOADS
from common import cli
from common.config.schema import RunConfig
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed
from common.evaluation.counts import Counts
from common.step.passes import Chunk
from common.step.pipeline import Pipeline
from common.step.train_step import Losses, TrainStep
from tests import toy
from tests.toy.evaluate import MeanAbsoluteError
from tests.toy.workload import Toy


class StagedError(MeanAbsoluteError):
    """The metric of a network whose layers are on two ranks."""

    def __init__(self, pipeline: Pipeline, run: Any, *arguments: Any) -> None:
        self._pipeline, self._run = pipeline, run
        super().__init__(*arguments)
        self._counts = Counts(self._layout, ("volumes",), ("error",), axes=("pp", "dp"))

    def _count(self, batch: dict[str, Tensor]) -> None:
        for estimate_BP in self._pipeline.forward([self._run], [Batch(batch, len(batch["volume"]))]):
            error_B = (estimate_BP - batch["parameters"]).double().abs().mean(dim=1)
            self._counts.add(batch["weight"].double().sum(), (error_B * batch["weight"]).sum())


class StagedToy(Toy):
    """The toy on two stages."""

    axes: ClassVar[Mapping[str, str]] = {"dp": "are data-parallel", "pp": "have a layer each"}

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        width, micro_batches = self.own.model.width, cfg.grad_accumulation_steps
        self.pipeline = Pipeline(
            layout, 1, micro_batches, lambda batch: Handed((len(batch.tensors["volume"]), width), self.dtype)
        )
        other = "output" if self.pipeline.first else "hidden"
        delattr(self.model, other)

    def layer(self, x: Tensor | None, batch: Batch) -> Tensor:
        if x is None:
            x = self.model.get_submodule("hidden")(batch.tensors["volume"])
            return nn.functional.leaky_relu(x, 0.3)
        estimate_BP: Tensor = self.model.get_submodule("output")(x)
        return estimate_BP

    def layer_and_loss(self, x: Tensor | None, batch: Batch) -> Tensor | Losses:
        made = self.layer(x, batch)
        if not self.pipeline.last:
            return made
        mean = nn.functional.mse_loss(made, batch.tensors["parameters"])
        return Losses(mean, {"loss": mean.detach()})

    def step_with(self, *arguments: Any, **options: Any) -> TrainStep:
        chunk = Chunk(self.model, self.layer_and_loss)
        step = super().step_with(
            *arguments, **options, passes=lambda scale: self.pipeline.forward_backward([chunk], ["loss"], scale)
        )
        step.rehearsing = self.pipeline.rehearsing
        return step

    def evaluation(self, layout: Layout) -> MeanAbsoluteError:
        example = torch.zeros(self.own.reader.eval_batch, self.own.facts.size**3, dtype=self.dtype)
        count, capture = self.own.facts.parameters, self.cfg.cuda_graphs
        return StagedError(self.pipeline, self.layer, self.model, example, count, layout, capture)


if __name__ == "__main__":
    toy.register()
    WORKLOADS[toy.NAME] = "tests.common.run.staged_toy:StagedToy"
    cli.main()
