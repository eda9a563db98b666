"""Mask R-CNN's learning rates. Biases have a multiple of the weights' rate, but the same absolute warm-up reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.maskrcnn.config import Facts, Hparams
from common.optim.groups import ParameterGroup
from common.optim.learning_rate import Schedule


def subtractive_warmup_then_step_decay(
    base: float,
    warmup_steps: int,
    warmup_factor: float,
    decay_steps: Sequence[int],
    decay_factor: float,
) -> Schedule:
    """Return the learning-rate schedule of the MLPerf reference.

    With t = counter + 1 and W = warmup_steps, the rate is base - (W - t) * warmup_factor while t < W, then
    base * decay_factor**(number of ``decay_steps`` that t has reached). The difference to ``base`` in the warm-up does
    not depend on ``base`` and can exceed it. The reference counts updates from 1, because it advances its schedule
    before the step. NVIDIA's submissions count from 0, so that the first decay comes one update later. We follow the
    reference.

    Args:
        base: rate after the warm-up.
        warmup_steps: W; 0 disables the warm-up.
        warmup_factor: amount by which the rate is lower for each remaining warm-up step.
        decay_steps: steps at which the rate is multiplied by ``decay_factor``.
    """

    def schedule(step: Tensor) -> Tensor:
        count = step + 1
        rate = torch.full_like(step, base, dtype=torch.float64)
        for decay_step in decay_steps:
            rate = torch.where(count >= decay_step, rate * decay_factor, rate)
        lacking = (warmup_steps - count).to(torch.float64) * warmup_factor
        return torch.where(count < warmup_steps, base - lacking, rate).to(torch.float32)

    return schedule


def learning_rate(facts: Facts, hparams: Hparams, bias: bool = False) -> Schedule:
    """Return the schedule of weights, or of biases."""
    return subtractive_warmup_then_step_decay(
        hparams.base_learning_rate * (facts.bias_rate if bias else 1.0),
        hparams.warmup_steps,
        hparams.warmup_factor,
        hparams.decay_steps,
        facts.decay_factor,
    )


def parameter_groups(model: nn.Module, facts: Facts, hparams: Hparams) -> list[ParameterGroup]:
    """Return two groups: weights with the optimizer's schedule, and biases with their own schedule and without decay.

    As in the reference's optimizer, the learning rate is not part of the momentum buffer. Frozen parameters are in no
    group.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = {name: parameter for name, parameter in trained.items() if "bias" not in name}
    biases = {name: parameter for name, parameter in trained.items() if "bias" in name}
    return [
        ParameterGroup(weights, hparams.weight_decay, learning_rate_in_momentum=False),
        ParameterGroup(biases, schedule=learning_rate(facts, hparams, bias=True), learning_rate_in_momentum=False),
    ]
