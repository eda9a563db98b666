"""Test the optimizer around its rule: steps, state, checkpoints, and refusals."""

import pytest
import torch
from torch import nn
from update_oracle import build, noise, parameter, snapshot, step

from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.optim.communication import GradientReducer, WeightGatherer
from common.optim.learning_rate import constant
from common.optim.momentum import LARS, SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.train_step import apply_gradients

RATES = [0.5, 1.0, 2.0, 1.5, 0.25]


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    model[0].half()
    return model.to(memory_format=torch.channels_last)


def optimizer_of(model: nn.Module, reverse: bool = False) -> Optimizer:
    named = dict(model.named_parameters())
    groups = [
        ParameterGroup({n: p for n, p in named.items() if p.ndim > 1}, 1e-4, trust_ratio=True),
        ParameterGroup({n: p for n, p in named.items() if p.ndim == 1}),
    ]
    return build(groups[::-1] if reverse else groups, LARS(0.9), RATES)


def gradients_of(model: nn.Module, seed: int) -> dict[nn.Parameter, torch.Tensor]:
    return {p: noise(1, *p.shape, seed=seed + i)[0] for i, p in enumerate(model.parameters())}


def test_accumulated_micro_batches_equal_the_large_batch():
    results = []
    for parts in (1, 4):
        layer = nn.Linear(5, 2)
        layer.load_state_dict({"weight": parameter(2, 5).detach(), "bias": parameter(2).detach()})
        groups = [ParameterGroup(dict(layer.named_parameters()))]
        optimizer = build(groups, SGD(0.9), RATES, grad_divisor=8.0)
        optimizer.begin()
        for index, part in enumerate(noise(1, 8, 5)[0].chunk(parts)):
            if index == parts - 1:
                optimizer.arm()
            layer(part).square().sum().backward()
        apply_gradients([optimizer], torch.tensor(0.0))
        results.append(layer.weight.detach())
    torch.testing.assert_close(results[0], results[1])


def test_begin_zeroes_gradients_and_detects_detached_views():
    model = model_of(0)
    optimizer = optimizer_of(model)
    step(optimizer, gradients_of(model, 1))
    optimizer.begin()
    assert all(p.grad.count_nonzero().item() == 0 for p in model.parameters())
    model.float()
    with pytest.raises(RuntimeError, match="no longer lies"):
        optimizer.begin()


def test_gathers_that_no_block_started_come_before_any_reduction(monkeypatch):
    log = []
    monkeypatch.setattr(WeightGatherer, "start_all", lambda self: log.append("gathers"))
    monkeypatch.setattr(GradientReducer, "arm", lambda self, parameters: log.append("reductions"))
    optimizer = optimizer_of(model_of(0))
    log.clear()
    optimizer.arm()
    assert log == ["gathers", "reductions"]


def test_step_counts_applied_updates_and_learning_rate_follows_it():
    weight = parameter(3)
    optimizer = build([ParameterGroup({"w": weight})], SGD(0.9), RATES)
    seen = []
    for skip in (0.0, 1.0, 1.0, 0.0, 0.0):
        step(optimizer, {weight: torch.ones(3)}, skip)
        seen.append(optimizer.metrics["learning_rate"].item())
    assert seen == [0.5, 1.0, 1.0, 1.0, 2.0]
    assert optimizer.state_dict()["step"].item() == 3


def test_named_state_covers_masters_momentum_and_step():
    names = [name for name, _ in optimizer_of(model_of(0)).named_state()]
    assert names == ["step", "masters.float16", "momentum.float16", "momentum.float32"]


def test_state_survives_a_round_trip_into_other_offsets():
    first, second = model_of(0), model_of(9)
    ours, theirs = optimizer_of(first), optimizer_of(second, reverse=True)
    for seed in (10, 20):
        step(ours, gradients_of(first, seed))
    second.load_state_dict(first.state_dict())
    theirs.load_state_dict(ours.state_dict())
    step(ours, gradients_of(first, 30))
    step(theirs, gradients_of(second, 30))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a.detach(), b.detach())
    assert theirs.state_dict()["step"].item() == 3


def test_loading_sets_half_parameters_from_the_masters():
    first, second = model_of(0), model_of(9)
    state = optimizer_of(first).state_dict()
    optimizer_of(second).load_state_dict(state)
    assert torch.equal(first[0].weight.detach(), second[0].weight.detach())


def test_state_dict_holds_tensors_of_the_parameters_shapes():
    model = model_of(0)
    state = optimizer_of(model).state_dict()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: t.shape for name, t in state["momentum"].items()} == shapes
    assert set(state["masters"]) == {"0.weight", "0.bias"}
    assert all(t.untyped_storage().nbytes() == 4 * t.numel() for t in state["momentum"].values())


def drop_momentum(state):
    del state["momentum"]["3.weight"]


def drop_step(state):
    del state["step"]


def add_entry(state):
    state["momentum"]["5.weight"] = torch.zeros(1)


def reshape_entry(state):
    state["masters"]["0.bias"] = torch.zeros(5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_momentum, r"missing: momentum\.3\.weight"),
        (drop_step, "missing: step"),
        (add_entry, r"unexpected: momentum\.5\.weight"),
        (reshape_entry, r"another shape: masters\.0\.bias \(5,\) instead of \(4,\)"),
    ],
)
def test_state_that_does_not_fit_is_named_and_changes_nothing(damage, message):
    model = model_of(0)
    optimizer = optimizer_of(model)
    state = optimizer_of(model_of(3)).state_dict()
    damage(state)
    before = snapshot(optimizer, *model.parameters())
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, *model.parameters()), strict=True))


def test_a_parameter_is_listed_once():
    weight = parameter(2)
    with pytest.raises(ValueError, match="same parameter"):
        build([ParameterGroup({"a": weight}), ParameterGroup({"b": weight})], SGD(0.9), [1.0])
    with pytest.raises(ValueError, match="in groups 0 and 1"):
        build([ParameterGroup({"a": weight}), ParameterGroup({"a": parameter(2)})], SGD(0.9), [1.0])


def test_unknown_axis_and_bad_divisor_are_refused():
    with pytest.raises(ValueError, match="unknown axis 'ep'"):
        build([ParameterGroup({"a": parameter(2)}, replicated_over=("ep",))], SGD(0.9), [1.0])
    with pytest.raises(ValueError, match="grad_divisor=0"):
        Optimizer([ParameterGroup({"a": parameter(2)})], SGD(0.9), constant(1.0), Layout(), grad_divisor=0)
    with pytest.raises(ValueError, match="summed_over names an unknown axis 'ep'"):
        build([ParameterGroup({"a": parameter(2)}, summed_over=("ep",))], SGD(0.9), [1.0])
    with pytest.raises(ValueError, match="either averaged or summed over 'tp', not both"):
        build([ParameterGroup({"a": parameter(2)}, replicated_over=("tp",), summed_over=("tp",))], SGD(0.9), [1.0])
