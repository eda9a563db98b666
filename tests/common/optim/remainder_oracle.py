"""Two optimizers on the same weights: with masters of their own, and with remainders."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from common.distributed.layout import Layout
from common.optim.adaptive import AdamW
from common.optim.buffers import split_masters
from common.optim.learning_rate import cosine_to
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup

SHAPES = {"weight": (70, 33), "norm": (19,)}
STEPS = 10
Masters = Literal["fp32", "remainder"]
KINDS: tuple[Masters, ...] = ("remainder", "fp32")


def parameters(dtype: torch.dtype = torch.bfloat16) -> dict[str, nn.Parameter]:
    """Return random parameters, always the same."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype)) for name, shape in SHAPES.items()
    }


def optimizer(
    named: dict[str, nn.Parameter], masters: Masters, implementation: str, layout: Layout | None = None, **options: Any
) -> Optimizer:
    """Return a clipped AdamW whose weight decay applies to the matrix only."""
    groups = [
        ParameterGroup({name: parameter}, weight_decay=0.1 if parameter.ndim > 1 else 0.0)
        for name, parameter in named.items()
    ]
    rule, schedule = AdamW(0.9, 0.95, 1e-5), cosine_to(1e-2, 1e-3, 20, 3)
    return Optimizer(
        groups, rule, schedule, layout or Layout(), grad_divisor=2.0, clip=ClipNorm(1.0, "after_reduction"),
        implementation=implementation, masters=masters, **options,
    )  # fmt: skip


def step(one: Optimizer, named: dict[str, nn.Parameter], seed: int, allowed: bool = True) -> None:
    """Apply an update with random gradients."""
    one.begin()
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        assert parameter.grad is not None
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
    one.arm()
    one.measure()
    one.write(torch.tensor(allowed))


def steps_of_both(implementation: str) -> None:
    """Check that masters and moments are equal bit for bit, and that weights are the masters rounded."""
    ours, theirs = parameters(), parameters()
    short, wide = optimizer(ours, "remainder", implementation), optimizer(theirs, "fp32", implementation)
    for seed in range(STEPS):
        step(short, ours, seed, allowed=seed != 4)
        step(wide, theirs, seed, allowed=seed != 4)
    found, expected = short.state_dict(), wide.state_dict()
    assert found.keys() == expected.keys()
    for kind in ("masters", "exp_avg", "exp_avg_sq"):
        for name, tensor in expected[kind].items():
            assert found[kind][name].dtype == torch.float32
            assert torch.equal(found[kind][name], tensor), f"{kind} of {name}"
    for name, parameter in ours.items():
        assert torch.equal(parameter.detach(), split_masters(expected["masters"][name])[0])
    assert {name: state.dtype for name, state in short.named_state() if "masters" in name} == {
        "masters.bfloat16": torch.int16
    }


def shared_by_ranks(rank: int, world: int, _: str) -> dict[str, Any]:
    """Train with both kinds of masters on sharded ranks, restart in the middle, and return states and weights."""
    layout = Layout({"dp": world}, rank, seed=7)
    found = {}
    for masters in KINDS:
        named = parameters()
        one = optimizer(named, masters, "reference", layout, shard="all", bucket_bytes=2048)
        for seed in range(STEPS):
            if seed == 5:
                saved = [one.state_dict()]  # the first rank has it
                dist.broadcast_object_list(saved)
                one.close()
                named = parameters()
                one = optimizer(named, masters, "reference", layout, shard="all", bucket_bytes=2048)
                one.load_state_dict(saved[0])
            step(one, named, seed, allowed=seed != 7)
        one.materialize()
        found[masters] = {"state": one.state_dict(), "weights": {n: p.detach().clone() for n, p in named.items()}}
        one.close()
    return found
