"""SSD300's learning rate: warm-up by iterations, and a fall after each of two epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from common.optim.learning_rate import Schedule


def warmup_steps(warmup_epochs: float, train_samples: int, global_batch: int) -> int:
    """Return the iterations in ``warmup_epochs``, rounded down."""
    return int(warmup_epochs * train_samples / global_batch)


def decay_steps(decay_epochs: Sequence[int], train_samples: int, global_batch: int) -> list[int]:
    """Return the number of updates before each decay, including the one that reaches the end of its epoch."""
    return [-(-epochs * train_samples // global_batch) for epochs in decay_epochs]


def warmup_then_falls(
    base: float,
    boundaries: Sequence[int],
    factor: float,
    warmup: int,
    warmup_factor: int = 0,
    first_step: Literal[0, 1] = 0,
) -> Schedule:
    """Return the learning-rate schedule of the MLPerf reference or of NVIDIA's submissions.

    With s = counter + first_step, W = warmup, f = warmup_factor and r = base * factor**(number of boundaries reached),
    the rate is r - (W - s) * r / (W * 2**f) while s < W, then r.

    The reference counts updates from 0. After the warm-up, it keeps the rate of the last warm-up iteration, r - r / (W
    * 2**f), until the next boundary, and only then uses r. NVIDIA's submissions count updates from 1, and the rate
    after the warm-up is r.

    Args:
        base: rate before the first boundary.
        boundaries: numbers of updates after which the rate falls.
        warmup: W, in updates; 0 disables the warm-up.
        warmup_factor: f; with 0, the warm-up begins at rate 0.
        first_step: number of the first update: 0 in the reference, 1 in NVIDIA's submissions.

    Raises:
        ValueError: ``warmup`` is negative.
    """
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: a warm-up cannot be negative")

    def schedule(step: Tensor) -> Tensor:
        rate = torch.full_like(step, base, dtype=torch.float64)
        for boundary in boundaries:
            rate = torch.where(step >= boundary, rate * factor, rate)
        if warmup:
            left = warmup - (step + first_step)
            if first_step == 0:
                later = [boundary for boundary in boundaries if boundary >= warmup]
                left = torch.where(step >= min(later), left, left.clamp(min=1)) if later else left.clamp(min=1)
            left = left.clamp(min=0).to(torch.float64)
            rate = rate - left * rate / (warmup * 2**warmup_factor)
        return rate.to(torch.float32)

    return schedule
