"""Another update rule needs its formula alone: Adagrad on what all rules share, against PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from update_oracle import build, noise, parameter, snapshot, step

from common.ops.implementation import Implementation, always
from common.optim.fragment_runs import note_overflow, runs_of, write_where
from common.optim.optimizer import ParameterGroup
from common.optim.rules import Binding, Formula, Rule, Update

RATES = [0.5, 1.0, 2.0, 1.5, 0.25]


@dataclass(frozen=True)
class Adagrad(Rule, Formula):
    """Duchi, Hazan, Singer (2011): s <- s + g^2; w <- w - lr * g / (sqrt(s) + epsilon)."""

    instead = "LARS"

    epsilon: float = 1e-10

    def formula(self) -> Adagrad:
        return self

    def implementations(self) -> Mapping[str, Implementation]:
        return {"torch": Implementation("torch", TorchAdagrad, always)}


class TorchAdagrad(Update):
    implementation = "torch"
    kinds = ("sum",)

    def __init__(self, formula: Adagrad, binding: Binding) -> None:
        super().__init__(binding)
        self._formula = formula
        self._runs = runs_of(binding, list(self.states.values()), alone=False)

    def measure(self, stats: Tensor) -> None:
        note_overflow(self._shards, stats)

    def apply(self, learning_rate: Tensor, step: Tensor, grad_factor: Tensor, write: Tensor) -> None:
        for run in self._runs:
            (total,) = run.states
            gradient = run.gradients(grad_factor)
            grown = total + gradient.square()
            write_where(write, total, grown)
            run.write(write, run.masters - learning_rate * gradient / (grown.sqrt() + self._formula.epsilon))


def test_a_rule_that_is_its_formula_alone_follows_torch_adagrad():
    ours, theirs = parameter(6, 5, dtype=torch.float64), parameter(6, 5, dtype=torch.float64)
    optimizer = build([ParameterGroup({"w": ours})], Adagrad(), RATES)
    reference = torch.optim.Adagrad([theirs], lr=1.0)
    for gradient, rate in zip(noise(5, 6, 5), RATES, strict=True):
        step(optimizer, {ours: gradient})
        theirs.grad = gradient.double()
        reference.param_groups[0]["lr"] = rate
        reference.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(optimizer.state_dict()["sum"]["w"], reference.state[theirs]["sum"])


def test_it_has_masters_state_and_a_checkpoint_like_the_others():
    half, beside = parameter(9, dtype=torch.float16), parameter(7)
    optimizer = build([ParameterGroup({"half": half, "beside": beside})], Adagrad(), RATES)
    names = [name for name, _ in optimizer.named_state()]
    assert names == ["step", "masters.float16", "sum.float16", "sum.float32"]
    assert set(optimizer.state_dict()) == {"step", "sum", "masters"}


@pytest.mark.parametrize(("value", "skip"), [(float("nan"), 0.0), (1.0, 1.0)])
def test_it_writes_no_bit_after_an_overflow_and_when_skipped(value, skip):
    half = parameter(9, dtype=torch.float16)
    optimizer = build([ParameterGroup({"half": half})], Adagrad(), RATES)
    step(optimizer, {half: torch.ones(9)})
    before = snapshot(optimizer, half)
    assert step(optimizer, {half: torch.full((9,), value)}, skip) == (value != 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, half), strict=True))


def test_it_refuses_trust_ratios_and_names_a_rule_that_has_them():
    with pytest.raises(ValueError, match="Adagrad has no trust ratio; use LARS"):
        build([ParameterGroup({"w": parameter(3)}, trust_ratio=True)], Adagrad(), RATES)
