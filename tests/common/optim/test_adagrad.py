"""Adagrad against torch.optim.Adagrad in float64 and hand-worked cases."""

import pytest
import torch
from update_oracle import build, parameter, step, step_beside

from common.optim.adaptive import Adagrad
from common.optim.optimizer import ParameterGroup
from tests.capturable import Capturable

RATES = [0.5, 1.0, 2.0, 1.5, 0.25]


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("epsilon", [1e-8, 0.1])
def test_it_equals_torch_adagrad(epsilon, weight_decay):
    ours, theirs = parameter(6, 5, dtype=torch.float64), parameter(6, 5, dtype=torch.float64)
    optimizer = build([ParameterGroup({"w": ours}, weight_decay)], Adagrad(epsilon), RATES)
    reference = torch.optim.Adagrad([theirs], lr=1.0, eps=epsilon, weight_decay=weight_decay)
    step_beside(optimizer, ours, reference, theirs, RATES)
    torch.testing.assert_close(optimizer.state_dict()["sum"]["w"], reference.state[theirs]["sum"])


def test_hand_worked_two_steps():
    # gradients 3 and 4 at rates 0.5 and 2, epsilon 1: 0.5 * 3 / (3 + 1), then 2 * 4 / (5 + 1)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = build([ParameterGroup({"w": weight})], Adagrad(1.0), [0.5, 2.0])
    step(optimizer, {weight: torch.full((1,), 3.0)})
    assert weight.item() == -0.375
    step(optimizer, {weight: torch.full((1,), 4.0)})
    assert weight.item() == pytest.approx(-0.375 - 4.0 / 3.0)


def test_the_first_step_has_the_size_of_the_rate_and_no_gradient_gives_none():
    weight = torch.nn.Parameter(torch.zeros(3))
    step(build([ParameterGroup({"w": weight})], Adagrad(), [0.25]), {weight: torch.tensor([1e-4, -7.0, 0.0])})
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.25, 0.25, 0.0]), rtol=2e-4, atol=0.0)
    assert weight[2] == 0.0


def test_divisor_and_scales_are_those_of_the_groups():
    weight = torch.nn.Parameter(torch.zeros(1))
    group = ParameterGroup({"w": weight}, lr_scale=2.0, grad_scale=0.5)
    optimizer = build([group], Adagrad(1.0), [0.25], grad_divisor=4.0)
    step(optimizer, {weight: torch.full((1,), 24.0)})  # 24 * 0.5 / 4 = 3
    assert weight.item() == -0.25 * 2.0 * 3.0 / 4.0


def test_it_has_masters_state_and_a_checkpoint_like_the_others():
    half, beside = parameter(9, dtype=torch.float16), parameter(7)
    optimizer = build([ParameterGroup({"half": half, "beside": beside})], Adagrad(), RATES)
    names = [name for name, _ in optimizer.named_state()]
    assert names == ["step", "masters.float16", "sum.float16", "sum.float32"]
    assert set(optimizer.state_dict()) == {"step", "sum", "masters"}


def test_an_update_can_be_recorded_in_a_graph():
    weight = parameter(9, dtype=torch.float16)
    optimizer = build([ParameterGroup({"w": weight})], Adagrad(), RATES)
    rates, factor, write, stats, count = (
        torch.tensor([0.5]), torch.tensor(1.0), torch.tensor(True), torch.zeros(2), torch.tensor(0),
    )  # fmt: skip
    (update,) = [value for value in vars(optimizer).values() if hasattr(value, "kinds")]
    with Capturable():
        update.measure(stats)
        update.apply(rates, count, factor, write)


def test_it_refuses_trust_ratios_and_names_a_rule_that_has_them():
    with pytest.raises(ValueError, match="Adagrad has no trust ratio; use LAMB"):
        build([ParameterGroup({"w": parameter(3)}, trust_ratio=True)], Adagrad(), RATES)


@pytest.mark.parametrize("epsilon", [0.0, 1e-40, float("nan")])
def test_an_epsilon_that_float32_does_not_hold_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon="):
        Adagrad(epsilon)
