"""A linear model as a workload, and a configuration for it, for tests of the contract in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from common.config.schema import OptimizerConfig, RunConfig, ScaleConfig
from common.contract.evaluation import Evaluation
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.distributed.layout import Layout
from common.optim.momentum import SGD
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep


def run_config(**changes: Any) -> RunConfig:
    """A configuration with four accumulated micro-batches of two samples."""
    nothing = cast(Any, SimpleNamespace(schedule={}))
    run = RunConfig(
        benchmark=nothing, scale=ScaleConfig(1, 1), system=nothing, layout={}, micro_batch=2, global_batch=8,
        grad_accumulation_steps=4, precision="fp64", optimizer=OptimizerConfig(), deterministic=False,
        assets_dir=None, workload=None,
    )  # fmt: skip
    return replace(run, **changes)


class LinearWorkload(Workload):
    """y = w * x with w = 1. The loss is the mean of y over the micro-batch, and the learning rate is 0.5."""

    config_type = NoneType
    title = "Line"

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        self.model = nn.Linear(1, 1, bias=False, dtype=self.dtype)
        nn.init.constant_(self.model.weight, 1.0)
        self.choices["product"] = "torch"

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup(dict(self.model.named_parameters()))]

    def loss(self, micro_batch: Batch) -> Losses:
        return Losses(self.model(micro_batch.tensors["x"]).mean(), {})

    def example_batches(self) -> Iterable[Batch]:
        yield Batch({"x": torch.ones(self.cfg.micro_batch, 1, dtype=self.dtype)}, self.nominal_samples)

    def build_step(self) -> TrainStep:
        return self.step_with(SGD(0.0), lambda step: torch.tensor(0.5))

    def open_data(self, root: Path) -> DataSource:
        raise NotImplementedError

    def evaluation(self, layout: Layout) -> Evaluation:
        raise NotImplementedError
