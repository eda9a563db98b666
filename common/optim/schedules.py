"""Learning-rate schedules that run on the device.

A schedule maps the optimizer's step counter (0-d int64 device tensor: applied updates, from 0) to the learning rate
(0-d float32 device tensor). Nothing waits for the device, so a schedule can be part of a captured iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Schedule = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ScheduleSteps:
    """Lengths of a schedule in optimizer steps."""

    steps_per_epoch: int
    warmup_steps: int
    total_steps: int


def constant(learning_rate: float) -> Schedule:
    """The same learning rate at every step."""

    def schedule(step: Tensor) -> Tensor:
        return torch.full_like(step, learning_rate, dtype=torch.float32)

    return schedule


def polynomial(
    base: float,
    end: float,
    power: float,
    warmup_steps: int,
    total_steps: int,
    first_step: Literal[0, 1] = 0,
) -> Schedule:
    """Linear warm-up from 0 to ``base``, then polynomial decay to ``end``.

    With s = counter + first_step, W = warmup_steps and D = total_steps - W + 1 - first_step:
    base * s / W while s <= W, then end + (base - end) * (1 - min((s - W) / D, 1)) ** power. The first of the
    ``total_steps`` updates runs at s = first_step. The MLPerf ResNet reference in TensorFlow counts from 0 (its first
    update has learning rate 0); NVIDIA's submissions count from 1. The reference stays at ``end`` after the decay;
    NVIDIA's polynomial goes on, and with an even power rises again. Ours stays at ``end`` in both, on purpose: only a
    run that did not converge in time gets there, and a learning rate that rises would not help it.

    Args:
        base: learning rate at the end of the warm-up.
        end: learning rate at the end of the decay.
        power: exponent of the decay.
        warmup_steps: W; 0 starts at ``base``.
        total_steps: steps of warm-up and decay together.
        first_step: what the first update counts as.

    Raises:
        ValueError: the warm-up is negative or leaves no step for the decay.
    """
    decay_steps = total_steps - warmup_steps + 1 - first_step
    if warmup_steps < 0 or decay_steps < 1:
        raise ValueError(f"warm-up of {warmup_steps} steps leaves {decay_steps} of {total_steps} steps for the decay")

    def schedule(step: Tensor) -> Tensor:
        count = step.to(torch.float64) + first_step
        done = ((count - warmup_steps) / decay_steps).clamp(max=1.0)
        decay = end + (base - end) * (1.0 - done) ** power
        if warmup_steps == 0:
            return decay.to(torch.float32)
        warmup = base * count / warmup_steps
        return torch.where(count <= warmup_steps, warmup, decay).to(torch.float32)

    return schedule


def reference_steps(
    train_samples: int,
    global_batch: int,
    epochs: int,
    warmup_epochs: int,
    evaluation_offset: int = 0,
    evaluation_period: int = 4,
) -> ScheduleSteps:
    """Schedule lengths as the MLPerf ResNet reference (TensorFlow 2) counts them.

    An epoch is floor(train_samples / global_batch) steps; the epochs are rounded up so that the last one is evaluated:
    offset + ceil((epochs - offset) / period) * period. For ``polynomial(first_step=0)``.
    """
    steps_per_epoch = train_samples // global_batch
    blocks = -(-(epochs - evaluation_offset) // evaluation_period)
    rounded = evaluation_offset + blocks * evaluation_period
    return ScheduleSteps(steps_per_epoch, warmup_epochs * steps_per_epoch, rounded * steps_per_epoch)


def nvidia_steps(
    train_samples: int, micro_batches: int, micro_batch: int, epochs: int, warmup_epochs: int
) -> ScheduleSteps:
    """Schedule lengths as NVIDIA's ResNet submissions count them.

    An epoch is ceil(floor(train_samples / micro_batches) / micro_batch) steps. For ``polynomial(first_step=1)``, which
    unlike theirs stays at its end.

    Args:
        train_samples: size of the training set.
        micro_batches: micro-batches in one step: ranks times gradient accumulation steps.
        micro_batch: samples in each.
        epochs: epochs until the end of the decay.
        warmup_epochs: epochs of warm-up.
    """
    steps_per_epoch = math.ceil(train_samples // micro_batches / micro_batch)
    return ScheduleSteps(steps_per_epoch, warmup_epochs * steps_per_epoch, epochs * steps_per_epoch)
