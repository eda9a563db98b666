"""Learning-rate schedules of DeepCAM: a linear warm-up, then steps or half a cosine.

They follow the MLPerf HPC reference, whose scheduler has counted one step before the first update: in all formulas,
s = counter + 1. With W warm-up steps, base rate b and warm-up factor f, the peak is b * f, and the rate while s < W is
start + (peak - start) * s / W, where start is 0 if f = 1, else b.

The reference never reaches the peak: after its warm-up it keeps the rate of the last warm-up step, s = W - 1. Here the
rate at s = W is the peak, as in NVIDIA's submissions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.optim.learning_rate import Schedule


class WarmUp(NamedTuple):
    """Linear warm-up of the learning rate.

    Attributes:
        base: b.
        steps: W; 0 starts at the peak.
        factor: f, at least 1.
    """

    base: float
    steps: int
    factor: float

    @property
    def peak(self) -> float:
        """Learning rate at the end of the warm-up."""
        return self.base * self.factor

    def before(self, s: Tensor, after: Tensor) -> Tensor:
        """Return the learning rate in fp32: that of the warm-up where s < W, else ``after``."""
        if self.steps == 0:
            return after.to(torch.float32)
        start = 0.0 if self.factor == 1 else self.base
        rising = start + (self.peak - start) * s / self.steps
        return torch.where(s < self.steps, rising, after).to(torch.float32)


def multistep(warm_up: WarmUp, milestones: Sequence[int], decay_rate: float) -> Schedule:
    """Return a schedule that multiplies the peak by ``decay_rate`` at every milestone.

    Milestone m takes effect at s = m without warm-up, and at s = m + W + 1 with one, as in the reference.
    """
    offset = warm_up.steps + 1 if warm_up.steps else 0

    def schedule(step: Tensor) -> Tensor:
        s = step.to(torch.float64) + 1
        rate = torch.full_like(s, warm_up.peak)
        for milestone in milestones:
            rate = torch.where(s >= milestone + offset, rate * decay_rate, rate)
        return warm_up.before(s, rate)

    return schedule


def cosine_annealing(warm_up: WarmUp, t_max: int, eta_min: float) -> Schedule:
    """Return a schedule along half a cosine: eta_min + (peak - eta_min) * (1 + cos(pi * min((s - W) / t_max, 1))) / 2.

    PyTorch's scheduler, which the reference uses, would rise again after ``t_max`` steps.
    """

    def schedule(step: Tensor) -> Tensor:
        s = step.to(torch.float64) + 1
        done = ((s - warm_up.steps) / t_max).clamp(max=1.0)
        return warm_up.before(s, eta_min + (warm_up.peak - eta_min) * (1.0 + torch.cos(math.pi * done)) / 2)

    return schedule
