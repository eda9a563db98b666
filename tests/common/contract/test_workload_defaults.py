"""What a workload has without writing it: a linear model that says only what is its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

from common.config.schema import Declaration, OptimizerConfig, RunConfig, ScaleConfig
from common.contract.evaluation import Evaluation
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.optim.momentum import SGD
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep


@dataclass(frozen=True)
class LineConfig:
    """The rate."""

    rate: float = 0.5


class Line(Workload):
    """y = w * x, whose loss is the mean of y over the micro-batch."""

    config_type = LineConfig
    title = "Line"
    own: LineConfig

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
        return self.step_with(SGD(0.0), lambda step: torch.tensor(self.own.rate))

    def open_data(self, root: Path) -> DataSource:
        raise NotImplementedError

    def evaluation(self, layout: Layout) -> Evaluation:
        raise NotImplementedError


class AveragedLine(Line):
    """Whose weights are averaged."""

    def build_step(self) -> TrainStep:
        return self.step_with(SGD(0.0), lambda step: torch.tensor(self.own.rate), average_decay=0.75)


class SplitLine(Line):
    """Whose ranks of an axis share a sample."""

    axes: ClassVar[dict[str, str]] = {"dp": "are data-parallel (dp)", "cp": "share a line (cp)"}


def run_of(**changes: Any) -> RunConfig:
    """The configuration of four accumulated micro-batches of two samples."""
    nothing = cast(Any, SimpleNamespace(schedule={}))
    run = RunConfig(
        benchmark=nothing, scale=ScaleConfig(1, 1), system=nothing, layout={}, micro_batch=2, global_batch=8,
        grad_accumulation_steps=4, precision="fp64", optimizer=OptimizerConfig(), deterministic=False,
        assets_dir=None, workload=LineConfig(),
    )  # fmt: skip
    return replace(run, **changes)


@pytest.mark.parametrize("axis", ["pp", "cp", "tp"])
def test_ranks_along_an_axis_that_a_workload_does_not_use_are_an_error(axis):
    with pytest.raises(ConfigError, match=f"^layout.{axis}=2: Line's ranks are data-parallel, use 1$"):
        Line(run_of(), Layout({axis: 2}))
    Line(run_of(), Layout({"dp": 2}))


def test_ranks_along_an_axis_that_a_workload_uses_are_none():
    SplitLine(run_of(), Layout({"dp": 2, "cp": 2}))
    says = r"^layout.tp=2: Line's ranks are data-parallel \(dp\) or share a line \(cp\), use 1$"
    with pytest.raises(ConfigError, match=says):
        SplitLine(run_of(), Layout({"tp": 2}))


def test_nothing_is_declared_of_a_configuration():
    declared = Line.declare(run_of())
    assert declared == Declaration()
    assert (declared.micro_batch_multiple, declared.order_of_data(), list(declared.forbidden)) == (1, "", [])


def test_the_samples_of_a_micro_batch_are_those_of_all_replicas():
    assert Line(run_of(), Layout({"dp": 3, "pp": 1})).nominal_samples == 6


def test_a_host_batch_is_copied_with_its_samples_and_key():
    batch = Line(run_of(), Layout()).prepare(HostBatch({"x": torch.tensor([[3.0]])}, 2, 0, key=("rows", 1)))
    assert (batch.tensors["x"].tolist(), batch.samples, batch.key) == ([[3.0]], 2, ("rows", 1))


def test_a_step_updates_with_the_mean_over_micro_batches():
    workload = Line(run_of(), Layout())
    step = workload.build_step()
    step([Batch({"x": torch.full((2, 1), value, dtype=torch.float64)}, 2) for value in (1.0, 2.0, 3.0, 6.0)])
    assert workload.model.weight.item() == 1.0 - 0.5 * 3.0


@pytest.mark.parametrize(
    ("ranks", "gradients", "applied"),
    [
        (2, "same", 256.0),
        (1, "same", 1024.0),  # nothing is summed over ranks
        (2, "fp32", 1024.0),  # a sum in fp32 stays in range
    ],
)
def test_the_loss_scale_is_divided_where_gradients_are_summed_in_fp16(ranks, gradients, applied):
    optimizer = OptimizerConfig(grad_predivide=4.0, gradients=gradients)
    scale = Line(run_of(precision="fp16", optimizer=optimizer), Layout({"dp": ranks})).scaled(1024.0)
    assert scale.applied.item() == applied
    assert scale.value.item() == 1024.0


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_only_fp16_scales_the_loss(precision):
    workload = Line(run_of(precision=precision), Layout())
    assert workload.scaled(1024.0) is None
    assert workload.loss_scale.item() == 1.0


def test_there_is_nothing_to_divide_without_a_loss_scale():
    workload = Line(run_of(precision="fp16", optimizer=OptimizerConfig(grad_predivide=4.0)), Layout({"dp": 2}))
    with pytest.raises(ConfigError, match=r"optimizer.grad_predivide=4.0: .* Line's loss has none; use 1"):
        workload.build_step()


def test_evaluation_uses_the_networks_own_parameters_with_the_last_update(monkeypatch):
    workload = Line(run_of(), Layout())
    (optimizer,) = workload.build_step().updaters
    asked = itertools.count()
    monkeypatch.setattr(optimizer, "materialize", lambda: next(asked))
    weights = workload.weights()
    assert next(asked) == 1, "the optimizer was not asked to bring the weights up to date"
    assert list(weights.tensors) == ["weight"]
    assert weights.tensors["weight"].data_ptr() == workload.model.weight.data_ptr()


def test_evaluation_uses_the_average_of_the_weights_where_the_step_takes_one():
    workload = AveragedLine(run_of(), Layout())
    step = workload.build_step()
    for value in (3.0, -1.0):
        step([Batch({"x": torch.full((2, 1), value, dtype=torch.float64)}, 2)] * 4)
    # The weights are 1, then 1 - 0.5 * 3 = -0.5, then -0.5 + 0.5 = 0.
    averaged = 0.75 * (0.75 * 1.0 + 0.25 * -0.5) + 0.25 * 0.0
    assert {name: weight.tolist() for name, weight in workload.weights().tensors.items()} == {"weight": [[averaged]]}
    assert workload.model.weight.item() == 0.0


def test_implementations_are_the_models_and_the_optimizers(monkeypatch):
    workload = Line(run_of(), Layout())
    assert workload.implementations() == {"product": "torch"}
    (optimizer,) = workload.build_step().updaters
    monkeypatch.setattr(optimizer, "choices", {"gradient reduction": "all-reduce"})
    assert workload.implementations() == {"product": "torch", "gradient reduction": "all-reduce"}
