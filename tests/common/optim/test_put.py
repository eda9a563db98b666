"""Test that setting the state of one parameter after another equals loading the whole state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.optim import buffers, state
from common.optim.adaptive import AdamW
from common.optim.buffers import FlatBuffer, build_flat_buffers
from common.optim.learning_rate import constant
from common.optim.optimizer import Optimizer, ParameterGroup

SHAPES = {"first": (70, 33), "kernel": (5, 3, 2, 2), "small": (3,), "last": (129,)}
"""Shapes of parameters; ``kernel`` is in channels_last."""
KINDS = ("masters", "exp_avg", "exp_avg_sq")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def drawn(purpose: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(purpose)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    made = {name: tensor.to(dtype) for name, tensor in drawn(0).items()}
    made["kernel"] = made["kernel"].contiguous(memory_format=torch.channels_last)
    return {name: nn.Parameter(tensor) for name, tensor in made.items()}


def built(ranks: int, index: int, remainders: bool, dtype: torch.dtype) -> tuple[list[FlatBuffer], state.Kinds]:
    """Return flat buffers of two groups, in buckets of one or two parameters, and the rank's state."""
    named = parameters(dtype)
    groups = [{"first": named["first"], "kernel": named["kernel"]}, {"small": named["small"], "last": named["last"]}]
    buffers = build_flat_buffers(groups, {}, ranks, index, 2000, remainders=remainders)
    kinds = {kind: [b.shard.new_state() for b in buffers] for kind in KINDS[1:]}
    return buffers, {**kinds, "masters": [b.shard.masters for b in buffers]}


def content(buffers: list[FlatBuffer], kinds: state.Kinds) -> list[Tensor]:
    flats = [flat for flats in kinds.values() for flat in flats]
    return [*flats, *(t for b in buffers for t in (b.parameters, b.shard.parameters))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_by_one_is_all_at_once(ranks, remainders, dtype, monkeypatch):
    monkeypatch.setattr(buffers, "_AT_ONCE", 300)
    named = {kind: drawn(number + 1) for number, kind in enumerate(KINDS)}
    changed = 0
    for index in range(ranks):
        wanted, found = built(ranks, index, remainders, dtype), built(ranks, index, remainders, dtype)
        before = [tensor.clone() for tensor in content(*found)]
        if dtype == torch.bfloat16:
            state.distribute(*wanted, named)
        else:  # masters of their own are the model's, which is loaded before
            for segment in wanted[0][0].segments:
                segment.parameter.data.copy_(named["masters"][segment.name])
            state.distribute(*wanted, named)
        for name in SHAPES:
            state.put(*found, name, {kind: named[kind][name] for kind in KINDS})
        for old, one, other in zip(before, content(*found), content(*wanted), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
            changed += not torch.equal(old, one)
    assert changed


def optimizer(named: dict[str, nn.Parameter]) -> Optimizer:
    return Optimizer([ParameterGroup(named)], AdamW(0.9, 0.95), constant(0.1), Layout(), grad_divisor=1.0)


def test_an_optimizer_has_what_was_put():
    named = parameters(torch.bfloat16)
    one, wanted = optimizer(named), {kind: drawn(number + 1) for number, kind in enumerate(KINDS)}
    for name in SHAPES:
        one.put(name, **{kind: wanted[kind][name] for kind in KINDS})
    one.set_step(4000)
    found = one.state_dict()
    assert found.pop("step") == 4000
    for kind, tensors in wanted.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[kind][name], tensor)
            if kind == "masters":
                assert torch.equal(named[name], tensor.bfloat16())
    one.check_views()


@pytest.mark.parametrize(
    ("name", "kinds", "shape", "words"),
    [
        ("other", KINDS, (3,), "no parameter 'other'"),
        ("small", KINDS[:2], (3,), "missing for small: exp_avg_sq"),
        ("small", (*KINDS, "momentum"), (3,), "unexpected for small: momentum"),
        ("small", KINDS, (4,), r"of another shape: masters.small \(4,\) instead of \(3,\)"),
    ],
)
def test_what_does_not_fit_is_refused(name, kinds, shape, words):
    with pytest.raises(CheckpointError, match=words):
        optimizer(parameters(torch.bfloat16)).put(name, **{kind: torch.zeros(shape) for kind in kinds})
