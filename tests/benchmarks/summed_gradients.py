"""Errors of the summed gradients of many micro-batches, and of the updated weights, relative to a float64 run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.contract.workload import Workload
from common.data.batches import Batch

MICRO_BATCHES, STEPS = 48, 3

Build = Callable[..., Any]
"""``built(*overrides)``: a pre-training of the ``test`` recipe, whose micro-batches have 2 rows of ``tokens``."""


class Errors(NamedTuple):
    """Relative norms of differences.

    Attributes:
        gradient: error of the first step's gradient.
        moved: error of the total update of the weights.
    """

    gradient: float
    moved: float


class _Run(NamedTuple):
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def check_that_fp32_is_closer(build: Build) -> None:
    """Check that fp32 gradients are more accurate than bf16 ones, with handwritten blocks and with autograd."""
    wide = "optimizer.gradients=fp32"
    variants: tuple[tuple[str, ...], ...] = ((), (wide, "optimizer.masters=remainder"), (wide, "model.blocks=autograd"))
    same, *others = errors(build, *variants)
    for in_fp32 in others:
        assert in_fp32.gradient < 0.6 * same.gradient
        assert in_fp32.moved < 0.6 * same.moved


def errors(build: Build, *variants: tuple[str, ...]) -> list[Errors]:
    """Return the errors of bf16 runs, one for each list of overrides, with the same start and rows as a float64 run.

    The optimizer's epsilon is large, so updates are proportional to the gradient.
    """
    given = (f"hparams.global_batch_size={2 * MICRO_BATCHES}", "hparams.epsilon=1.0")
    start = {name: weight.detach().clone() for name, weight in build("precision=bf16").model.named_parameters()}
    exact = _run(build(*given, "precision=fp64", "model.blocks=autograd"), start)
    moved, results = _moved(exact, start), []
    for overrides in variants:
        found = _run(build(*given, "precision=bf16", *overrides), start)
        results.append(Errors(_error(found.gradients, exact.gradients), _error(_moved(found, start), moved)))
    return results


def _moved(run: _Run, start: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: run.weights[name] - weight.double() for name, weight in start.items()}


def _run(workload: Workload, start: dict[str, Tensor]) -> _Run:
    named = dict(workload.model.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(start[name])
    step, (example,) = workload.build_step(), workload.example_batches()
    batches = [drawn(example, seed) for seed in range(MICRO_BATCHES)]
    step(batches)
    gradients = {name: _gradient(parameter) for name, parameter in named.items()}
    for _ in range(STEPS - 1):
        step(batches)
    assert workload._optimizer is not None
    weights = workload._optimizer.state_dict().get("masters") or named
    return _Run(gradients, {name: weight.detach().double() for name, weight in weights.items()})


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.double().clone()


def drawn(example: Batch, seed: int) -> Batch:
    """Replace the tokens by random ones, except those that are no labels."""
    tokens = example.tensors["tokens"]
    drawn = torch.randint(90, tokens.shape, generator=torch.Generator().manual_seed(seed), dtype=tokens.dtype)
    return Batch({"tokens": torch.where(tokens < 0, tokens, drawn)}, example.samples)


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    difference = sum(float((found[name] - value).square().sum()) for name, value in expected.items())
    return (difference / sum(float(value.square().sum()) for value in expected.values())) ** 0.5
