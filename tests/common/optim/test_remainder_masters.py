"""Test masters that are stored as a bf16 weight and 16 more bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from remainder_oracle import STEPS, optimizer, parameters, shared_by_ranks, step, steps_of_both
from torch import nn

from common.distributed.layout import Layout
from common.optim import buffers
from common.optim.adaptive import LAMB
from common.optim.buffers import joined_masters, split_masters
from common.optim.ema import WeightAverage
from common.optim.learning_rate import constant
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from tests.gloo_ranks import on_ranks


def test_any_float32_comes_back_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    assert torch.equal(joined_masters(*split_masters(values)).view(torch.int32), bits)


def test_masters_are_set_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_AT_ONCE", 300)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    empty = torch.zeros(1200)
    held = buffers.Shard(empty.bfloat16(), empty.bfloat16(), empty.short(), ())
    held.write_masters(slice(100, 1100), values)
    assert torch.equal(held.read_masters(slice(100, 1100)), values)
    assert torch.equal(held.read_masters(slice(0, 1200)).nonzero().flatten(), 100 + values.nonzero().flatten())


def test_the_weight_is_the_nearest_and_of_two_the_larger() -> None:
    """Hand-worked around 1: the next bf16 number is 1 + 2^-7, so 1 + 2^-8 is in the middle."""
    values = torch.tensor([1.0, 1.0 + 2**-9, 1.0 + 2**-8, 1.0 + 2**-8 - 2**-20, -1.0 - 2**-8, 1.0 + 2**-7])
    nearest, remainders = split_masters(values)
    assert nearest.tolist() == [1.0, 1.0, 1.0 + 2**-7, 1.0, -1.0 - 2**-7, 1.0 + 2**-7]
    assert remainders.tolist() == [0, 2**14, -(2**15), 2**15 - 8, -(2**15), 0]
    drawn = torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(split_masters(drawn)[0], drawn.bfloat16()), "without ties it is PyTorch's own rounding"


def test_updates_are_those_of_float32_masters() -> None:
    steps_of_both("reference")


def test_a_state_goes_on_with_either_kind_of_masters() -> None:
    whole, saved = parameters(), {}
    first = optimizer(whole, "remainder", "reference")
    for seed in range(STEPS):
        if seed == 5:
            saved = {"weights": {name: p.detach().clone() for name, p in whole.items()}, "state": first.state_dict()}
        step(first, whole, seed)
    for masters in ("fp32", "remainder"):
        named = parameters()
        resumed = optimizer(named, masters, "reference")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(saved["weights"][name])
        resumed.load_state_dict(saved["state"])
        for seed in range(5, STEPS):
            step(resumed, named, seed)
        for name, master in first.state_dict()["masters"].items():
            assert torch.equal(resumed.state_dict()["masters"][name], master)


def test_averages_are_of_the_values_that_weight_and_remainder_are() -> None:
    averages = []
    for masters in ("fp32", "remainder"):
        named = parameters()
        trained = optimizer(named, masters, "reference")
        average = WeightAverage(trained, 0.75)
        for seed in range(3):
            step(trained, named, seed)
            average.write(torch.ones((), dtype=torch.bool))
        averages.append(average.state_dict()["average"])
    fp32, remainder = averages
    assert fp32.keys() == remainder.keys()
    assert all(torch.equal(remainder[name], value) for name, value in fp32.items())


def test_ranks_that_share_them_have_those_of_float32_masters(tmp_path: Path) -> None:
    first, second = on_ranks(shared_by_ranks, 2, tmp_path)
    ours, theirs = first["remainder"]["state"], first["fp32"]["state"]
    for kind in ("masters", "exp_avg", "exp_avg_sq"):
        for name, tensor in theirs[kind].items():
            assert torch.equal(ours[kind][name], tensor), f"{kind} of {name}"
    for name, master in ours["masters"].items():
        nearest = split_masters(master)[0]
        assert all(torch.equal(rank["remainder"]["weights"][name], nearest) for rank in (first, second))


def test_other_weights_keep_masters_of_their_own() -> None:
    named = parameters(torch.float32)
    one = optimizer(named, "remainder", "reference")
    step(one, named, 0)
    assert not any(state.dtype == torch.int16 for _, state in one.named_state())


@pytest.mark.parametrize("rule", [LAMB(), SGD(0.9)])
def test_other_rules_are_refused(rule: LAMB | SGD) -> None:
    group = ParameterGroup({"weight": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}, trust_ratio=True)
    if isinstance(rule, SGD):
        group = ParameterGroup(group.parameters)
    with pytest.raises(ValueError, match="Adam and AdamW only"):
        Optimizer([group], rule, constant(0.1), Layout(), grad_divisor=1, masters="remainder")
