"""Optimizers of bfloat16 weights whose gradients are float32, and what their updates have to be."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.optim.adagrad import Adagrad
from common.optim.adaptive import LAMB, Adam, AdamW
from common.optim.clip import ClipNorm
from common.optim.learning_rate import constant
from common.optim.momentum import LARS, SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.optim.rules import Rule

SHAPES = {"weight": (70, 33), "norm": (19,)}
RATE, STEPS, MAX_NORM, DECAY = 1e-2, 8, 1.0, 0.1
RULES: dict[str, Rule] = {
    "adam": Adam(),
    "adamw": AdamW(),
    "lamb": LAMB(),
    "sgd": SGD(0.9, nesterov=True),
    "lars": LARS(0.9, eta=10.0, epsilon=1e-6),
    "adagrad": Adagrad(1e-8),
}
CLIPS = {"after": ClipNorm(MAX_NORM, "after_reduction"), "before": ClipNorm(MAX_NORM, "before_reduction")}
MICRO_BATCHES = 3


def parameters(dtype: torch.dtype, device: str = "cpu") -> dict[str, nn.Parameter]:
    """Drawn in bfloat16, the same every time."""
    generator = torch.Generator().manual_seed(1)
    drawn = {name: (torch.randn(shape, generator=generator) * 0.1).bfloat16() for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(device, dtype)) for name, value in drawn.items()}


def drawn_gradients(seed: int) -> dict[str, Tensor]:
    """Float32 numbers, hardly any of which is a bfloat16."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer(named: dict[str, nn.Parameter], rule: Rule, **options: Any) -> Optimizer:
    """Of both parameters, of which the matrix decays."""
    trusted = isinstance(rule, LAMB | LARS)
    groups = [
        ParameterGroup({name: parameter}, DECAY if parameter.ndim > 1 else 0.0, trust_ratio=trusted)
        for name, parameter in named.items()
    ]
    layout = Layout(device=next(iter(named.values())).device)
    return Optimizer(groups, rule, constant(RATE), layout, grad_divisor=float(MICRO_BATCHES), **options)


def step(one: Optimizer, named: dict[str, nn.Parameter], micro_batches: list[dict[str, Tensor]]) -> None:
    """An update with the sum of made-up gradients."""
    one.begin()
    for number, gradients in enumerate(micro_batches, 1):
        if number == len(micro_batches):
            one.arm()
        for name, parameter in named.items():
            assert parameter.grad is not None
            parameter.grad.add_(gradients[name].to(parameter.device))
        one.collect()
    allowed = ~one.measure()
    assert allowed
    one.write(allowed)


def masters_of(one: Optimizer, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Float32, whether a weight has a master or is its own."""
    found = one.state_dict()
    masters: dict[str, Tensor] = found.get("masters") or {name: weight.detach().cpu() for name, weight in named.items()}
    return masters


def follows_float32_weights(rule: str, clip: str, implementation: str, device: str = "cpu") -> None:
    """The masters are what float32 weights become with the same gradients; with bfloat16 gradients they are not."""
    found = {}
    for kind, dtype, gradients in (
        ("wide", torch.bfloat16, "fp32"), ("whole", torch.float32, "same"), ("narrow", torch.bfloat16, "same"),
    ):  # fmt: skip
        named = parameters(dtype, device)
        one = optimizer(
            named, RULES[rule], clip=CLIPS[clip], implementation=implementation, micro_batches=MICRO_BATCHES,
            gradients=gradients,
        )  # fmt: skip
        assert one.implementation == implementation
        for number in range(2):
            step(one, named, [drawn_gradients(MICRO_BATCHES * number + n) for n in range(MICRO_BATCHES)])
        found[kind] = masters_of(one, named)
    for name, expected in found["whole"].items():
        torch.testing.assert_close(found["wide"][name], expected, rtol=1e-6, atol=1e-8)
        assert (found["narrow"][name] - expected).abs().max() > 1e-6, "the test would not notice bfloat16"


def follows_torch(implementation: str, device: str = "cpu") -> None:
    """AdamW with remainders for masters, clipped, against ``torch.optim.AdamW`` in float64."""
    named = parameters(torch.bfloat16, device)
    one = optimizer(
        named, AdamW(0.9, 0.95, 1e-5), clip=CLIPS["after"], implementation=implementation, masters="remainder",
        gradients="fp32",
    )  # fmt: skip
    theirs = parameters(torch.float64)
    groups = [{"params": [theirs["weight"]], "weight_decay": DECAY}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=float(torch.tensor(RATE)), betas=(0.9, 0.95), eps=1e-5)
    for seed in range(STEPS):
        gradients = drawn_gradients(seed)
        step(one, named, [gradients])
        for name, weight in theirs.items():
            weight.grad = gradients[name].double() / MICRO_BATCHES
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), MAX_NORM)
        assert math.isclose(one.metrics["gradient_norm"].item(), norm.item(), rel_tol=1e-6)
        reference.step()
    masters = masters_of(one, named)
    for name, weight in theirs.items():
        torch.testing.assert_close(masters[name].double(), weight.detach(), rtol=2e-6, atol=2e-7)
