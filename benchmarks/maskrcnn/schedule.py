"""Mask R-CNN's learning rates: biases train at a multiple of the others' rate, but warm up by the same amounts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.maskrcnn.config import Facts, Hparams
from common.optim.groups import ParameterGroup
from common.optim.learning_rate import Schedule


def warmup_by_amounts(
    base: float,
    warmup_steps: int,
    warmup_factor: float,
    decay_steps: Sequence[int],
    decay_factor: float,
    first_step: Literal[0, 1] = 1,
) -> Schedule:
    """The learning rate of the MLPerf reference.

    With t = counter + first_step and W = warmup_steps: base - (W - t) * warmup_factor while t < W, then
    base * decay_factor**(those of ``decay_steps`` that t has reached). What a step of the warm-up lacks does not depend
    on ``base``, and may be more than it. The reference's first update counts as 1, since it moves its schedule before
    the step; that of NVIDIA's submissions as 0, with the first fall one update later. Ours are the reference's.

    Args:
        base: at the end of the warm-up.
        warmup_steps: W; 0 is no warm-up.
        warmup_factor: what the rate lacks for each step that is left of the warm-up.
        decay_steps: where the rate falls.
        decay_factor: by which it falls at each.
        first_step: what the first update counts as.

    Raises:
        ValueError: the warm-up is negative.
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: a warm-up cannot be negative")

    def schedule(step: Tensor) -> Tensor:
        count = step + first_step
        rate = torch.full_like(step, base, dtype=torch.float64)
        for decay_step in decay_steps:
            rate = torch.where(count >= decay_step, rate * decay_factor, rate)
        lacking = (warmup_steps - count).to(torch.float64) * warmup_factor
        return torch.where(count < warmup_steps, base - lacking, rate).to(torch.float32)

    return schedule


def learning_rate(facts: Facts, hparams: Hparams, bias: bool = False) -> Schedule:
    """The schedule of weights, or of biases."""
    return warmup_by_amounts(
        hparams.base_learning_rate * (facts.bias_rate if bias else 1.0),
        hparams.warmup_steps,
        hparams.warmup_factor,
        hparams.decay_steps,
        facts.decay_factor,
    )


def parameter_groups(model: nn.Module, facts: Facts, hparams: Hparams) -> list[ParameterGroup]:
    """Weights, with the optimizer's learning rate; and biases, which have one of their own and do not decay.

    The momentum buffer holds directions, as in the reference's optimizer. Frozen parameters are in no group.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = {name: parameter for name, parameter in trained.items() if "bias" not in name}
    biases = {name: parameter for name, parameter in trained.items() if "bias" in name}
    return [
        ParameterGroup(weights, hparams.weight_decay, learning_rate_in_momentum=False),
        ParameterGroup(biases, schedule=learning_rate(facts, hparams, bias=True), learning_rate_in_momentum=False),
    ]
