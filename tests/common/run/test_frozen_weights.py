"""Frozen tensors, such as the base of an adapter: not updated, copied, saved or sent."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from common.contract.evaluation import Weights
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.tensor_split import TensorSplit
from common.errors import CheckpointError
from common.evaluation.forward import evaluating
from common.nn.frozen import frozen_names, mark_frozen
from common.optim.momentum import SGD
from common.optim.optimizer import ParameterGroup
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.step.graphs import StepRunner
from common.step.train_step import Losses, TrainStep
from tests.linear_workload import LinearWorkload, run_config


class FrozenLinear(nn.Module):
    """A linear layer with frozen weights and a frozen scale, and a trained adapter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 3, generator=generator))
        self.adapter = nn.Parameter(torch.zeros(3, 3))
        self.register_buffer("scale", torch.rand((), generator=generator))
        self.register_buffer("calls", torch.zeros(()))
        mark_frozen(self, ["weight", "scale"])

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ (self.scale * self.weight + self.adapter)


class Adapted(LinearWorkload):
    """Two such layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(run_config(precision="fp32", grad_accumulation_steps=1, workload=None), Layout())
        self.model = nn.Sequential(FrozenLinear(seed), FrozenLinear(seed + 1))

    def parameter_groups(self) -> list[ParameterGroup]:
        named = self.model.named_parameters()
        return [ParameterGroup({name: parameter for name, parameter in named if name not in self.frozen()})]

    def loss(self, micro_batch: Batch) -> Losses:
        loss = self.model(micro_batch.tensors["x"]).square().mean()
        return Losses(loss, {"loss": loss.detach()})

    def example_batches(self) -> Iterable[Batch]:
        yield Batch({"x": torch.ones(2, 3)}, 2)

    def build_step(self) -> TrainStep:
        return self.step_with(SGD(0.5), lambda step: torch.tensor(0.5))


FROZEN = {"0.weight", "0.scale", "1.weight", "1.scale"}
CHANGING = {"0.adapter", "0.calls", "1.adapter", "1.calls"}


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def trained(workload: Adapted, steps: int = 2) -> TrainStep:
    step = workload.build_step()
    for _ in range(steps):
        step([Batch({"x": torch.randn(2, 3, generator=torch.Generator().manual_seed(steps))}, 2)])
    return step


def test_frozen_tensors_are_those_that_the_modules_have_marked():
    workload = Adapted()
    assert workload.frozen() == frozen_names(workload.model) == FROZEN
    assert {name for name, _ in workload.named_state()} == CHANGING
    assert not any(workload.model.get_parameter(name).requires_grad for name in ("0.weight", "1.weight"))


def test_a_shared_tensor_is_frozen_under_every_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    mark_frozen(model, ["0.weight"])
    mark_frozen(model, ["1.bias"])
    assert frozen_names(model) == {"0.weight", "1.weight", "1.bias"}
    assert frozen_names(nn.Linear(1, 1)) == frozenset()


def test_freezing_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="Linear has no parameter and no buffer 'wait'"):
        mark_frozen(nn.Linear(1, 1), ["weight", "wait"])


def test_training_changes_only_tensors_that_are_not_frozen():
    workload = Adapted()
    before = copies(workload.model)
    trained(workload)
    after = copies(workload.model)
    assert {name for name in after if not torch.equal(after[name], before[name])} == CHANGING


def test_a_group_with_a_frozen_parameter_is_an_error():
    workload = Adapted()
    workload.parameter_groups = lambda: [ParameterGroup({"mine": workload.model[0].weight})]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="'mine' is frozen"):
        workload.build_step()


def test_a_split_parameter_under_another_name_is_an_error():
    workload = Adapted()
    split = {"0.adapter": TensorSplit.over_tp(Layout(), (3, 3))}
    workload.tensor_splits = lambda: split  # type: ignore[method-assign]
    workload.build_step()
    workload.parameter_groups = lambda: [ParameterGroup({"mine": workload.model[0].adapter})]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"'mine' is split over tp under another name, '0\.adapter'"):
        workload.build_step()


def test_warm_up_restores_no_frozen_buffer(monkeypatch):
    workload = Adapted()
    spoil = workload.loss

    def loss(micro_batch: Batch) -> Losses:
        workload.model[0].scale.data.add_(1.0)
        return spoil(micro_batch)

    monkeypatch.setattr(workload, "loss", loss)
    before = copies(workload.model)
    StepRunner(workload.build_step(), workload.model, 1).warm_up(workload.example_batches())
    after = copies(workload.model)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"0.scale"}


def test_an_evaluation_receives_only_trained_parameters():
    workload, elsewhere = Adapted(), Adapted()
    trained(workload)
    weights = workload.weights()
    assert set(weights.tensors) == {"0.adapter", "1.adapter"}
    sent = Weights({name: tensor.clone() for name, tensor in weights.tensors.items()})
    before = copies(elsewhere.model)
    x = torch.randn(4, 3)
    with evaluating(elsewhere.model, sent):
        found = elsewhere.model(x)
    assert torch.equal(found, workload.model(x))
    changed = {name for name, tensor in copies(elsewhere.model).items() if not torch.equal(tensor, before[name])}
    assert changed == {"0.calls", "1.calls"}


def test_weights_without_a_trained_parameter_are_an_error():
    workload = Adapted()
    incomplete = Weights({"0.adapter": torch.zeros(3, 3)})
    with pytest.raises(KeyError, match=r"1\.adapter"), evaluating(workload.model, incomplete):
        pass


def save(folder: Path, workload: Adapted, base: str | None = "one") -> Path:
    updaters = trained(workload).updaters
    return checkpoint.save(folder, Progress(2), 7, {}, workload.model, tuple(updaters), Layout(), base=base)


def test_a_checkpoint_has_the_digest_instead_of_frozen_tensors(tmp_path):
    content = torch.load(save(tmp_path, Adapted()) / "rank_0.pt", weights_only=True)
    assert set(content["model"]) == CHANGING
    assert set(content["updaters"][0]["momentum"]) == {"0.adapter", "1.adapter"}
    assert content["base"] == "one"


def test_a_resumed_run_keeps_its_own_frozen_tensors(tmp_path):
    saved, resumed = Adapted(), Adapted(seed=5)
    own = copies(resumed.model)
    addresses = {name: tensor.data_ptr() for name, tensor in resumed.model.state_dict().items()}
    content = checkpoint.read(save(tmp_path, saved), {}, Layout())
    checkpoint.restore(content, resumed.model, tuple(resumed.build_step().updaters), Layout(), base="one")
    after, wanted = copies(resumed.model), copies(saved.model)
    assert all(torch.equal(after[name], (own if name in FROZEN else wanted)[name]) for name in after)
    assert all(resumed.model.state_dict()[name].data_ptr() == addresses[name] for name in FROZEN)


@pytest.mark.parametrize(
    ("made", "now", "words"),
    [
        ("one", "two", "made with the base weights one, this run has two"),
        ("one", None, r"made with the base weights one, this run has \(none\)"),
        (None, "two", r"made with the base weights \(none\), this run has two"),
    ],
)
def test_another_base_is_refused_by_name(made, now, words, tmp_path):
    workload = Adapted()
    content = checkpoint.read(save(tmp_path, workload, made), {}, Layout())
    with pytest.raises(CheckpointError, match=words):
        checkpoint.restore(content, workload.model, (), Layout(), base=now)


def test_a_checkpoint_with_a_tensor_that_is_frozen_now_is_refused(tmp_path):
    workload = Adapted()
    saved = checkpoint.save(tmp_path, Progress(2), 7, {}, workload.model, (), Layout())
    mark_frozen(workload.model, ["1.adapter"])
    with pytest.raises(CheckpointError, match=r"another model: it changed 1\.adapter, which is frozen in this run"):
        checkpoint.restore(checkpoint.read(saved, {}, Layout()), workload.model, (), Layout())


def test_a_workload_without_frozen_tensors_has_no_base():
    workload = Adapted()
    assert workload.base_digest() is None
    assert workload.tensor_splits() == {}
