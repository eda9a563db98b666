"""Defaults of the class Workload, with a linear model that implements only what is abstract."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch

from common.config.schema import Declaration, OptimizerConfig
from common.data.batches import Batch, HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.optim.momentum import SGD
from common.step.train_step import TrainStep
from tests.linear_workload import LinearWorkload, run_config


class AveragedLine(LinearWorkload):
    """A workload with averaged weights."""

    def build_step(self) -> TrainStep:
        return self.step_with(SGD(0.0), lambda step: torch.tensor(0.5), average_decay=0.75)


class SplitLine(LinearWorkload):
    """A workload whose ranks on ``cp`` share a sample."""

    axes: ClassVar[dict[str, str]] = {"dp": "are data-parallel (dp)", "cp": "share a line (cp)"}


@pytest.mark.parametrize("axis", ["pp", "cp", "tp"])
def test_several_ranks_on_an_unused_axis_are_an_error(axis):
    with pytest.raises(ConfigError, match=f"^layout.{axis}=2: Line's ranks are data-parallel, use 1$"):
        LinearWorkload(run_config(), Layout({axis: 2}))
    LinearWorkload(run_config(), Layout({"dp": 2}))


def test_a_workload_may_use_more_axes():
    SplitLine(run_config(), Layout({"dp": 2, "cp": 2}))
    says = r"^layout.tp=2: Line's ranks are data-parallel \(dp\) or share a line \(cp\), use 1$"
    with pytest.raises(ConfigError, match=says):
        SplitLine(run_config(), Layout({"tp": 2}))


def test_the_default_declaration_is_empty():
    declared = LinearWorkload.declare(run_config())
    assert declared == Declaration()
    assert (declared.micro_batch_multiple, declared.order_of_data(), list(declared.forbidden)) == (1, "", [])


def test_nominal_samples_count_all_replicas():
    assert LinearWorkload(run_config(), Layout({"dp": 3, "pp": 1})).nominal_samples == 6


def test_a_host_batch_is_copied_with_its_samples_and_key():
    batch = LinearWorkload(run_config(), Layout()).prepare(
        HostBatch({"x": torch.tensor([[3.0]])}, 2, 0, key=("rows", 1))
    )
    assert (batch.tensors["x"].tolist(), batch.samples, batch.key) == ([[3.0]], 2, ("rows", 1))


def test_a_step_updates_with_the_mean_over_micro_batches():
    workload = LinearWorkload(run_config(), Layout())
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
    scale = LinearWorkload(run_config(precision="fp16", optimizer=optimizer), Layout({"dp": ranks})).scaled(1024.0)
    assert scale.applied.item() == applied
    assert scale.value.item() == 1024.0


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_only_fp16_scales_the_loss(precision):
    workload = LinearWorkload(run_config(precision=precision), Layout())
    assert workload.scaled(1024.0) is None
    assert workload.loss_scale.item() == 1.0


def test_grad_predivide_without_a_loss_scale_is_an_error():
    workload = LinearWorkload(
        run_config(precision="fp16", optimizer=OptimizerConfig(grad_predivide=4.0)), Layout({"dp": 2})
    )
    with pytest.raises(ConfigError, match=r"optimizer.grad_predivide=4.0: .* Line's loss has none; use 1"):
        workload.build_step()


def test_the_weights_are_the_models_parameters_after_the_last_update(monkeypatch):
    workload = LinearWorkload(run_config(), Layout())
    (optimizer,) = workload.build_step().updaters
    asked = itertools.count()
    monkeypatch.setattr(optimizer, "materialize", lambda: next(asked))
    weights = workload.weights()
    assert next(asked) == 1, "the optimizer was not asked to bring the weights up to date"
    assert list(weights.tensors) == ["weight"]
    assert weights.tensors["weight"].data_ptr() == workload.model.weight.data_ptr()


def test_weights_are_averages_if_the_step_averages():
    workload = AveragedLine(run_config(), Layout())
    step = workload.build_step()
    for value in (3.0, -1.0):
        step([Batch({"x": torch.full((2, 1), value, dtype=torch.float64)}, 2)] * 4)
    # The weights are 1, then 1 - 0.5 * 3 = -0.5, then -0.5 + 0.5 = 0.
    averaged = 0.75 * (0.75 * 1.0 + 0.25 * -0.5) + 0.25 * 0.0
    assert {name: weight.tolist() for name, weight in workload.weights().tensors.items()} == {"weight": [[averaged]]}
    assert workload.model.weight.item() == 0.0


def test_implementations_are_those_of_model_and_optimizer(monkeypatch):
    workload = LinearWorkload(run_config(), Layout())
    assert workload.implementations() == {"product": "torch"}
    (optimizer,) = workload.build_step().updaters
    monkeypatch.setattr(optimizer, "choices", {"gradient reduction": "all-reduce"})
    assert workload.implementations() == {"product": "torch", "gradient reduction": "all-reduce"}
