"""SSD300's learning rate: a warm-up by iterations, and a fall at the boundaries of two epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from common.optim.learning_rate import Schedule


def warmup_steps(warmup_epochs: float, train_samples: int, global_batch: int) -> int:
    """Iterations of the warm-up, rounded down."""
    return int(warmup_epochs * train_samples / global_batch)


def decay_steps(decay_epochs: Sequence[int], train_samples: int, global_batch: int) -> list[int]:
    """Updates before each boundary: those that the epochs before it take, the one that reaches their end included."""
    return [-(-epochs * train_samples // global_batch) for epochs in decay_epochs]


def warmup_then_falls(
    base: float,
    boundaries: Sequence[int],
    factor: float,
    warmup: int,
    warmup_factor: int = 0,
    first_step: Literal[0, 1] = 0,
) -> Schedule:
    """The learning rate of the MLPerf reference, or that of NVIDIA's submissions.

    With s = counter + first_step, W = warmup, f = warmup_factor and r = base * factor**(boundaries that the counter has
    reached): r - (W - s) * r / (W * 2**f) while s < W, then r.

    The reference's first update counts as 0. After its warm-up the reference leaves the rate at that of the last
    iteration of the warm-up, r - r / (W * 2**f), and sets it to r at the next boundary only. NVIDIA's first update
    counts as 1, and the rate after the warm-up is r.

    Args:
        base: before the first boundary.
        boundaries: updates after which the learning rate falls.
        factor: by which it falls at each.
        warmup: W, in updates; 0 is no warm-up.
        warmup_factor: f; with 0 the warm-up begins at 0.
        first_step: counter of the first update: 0 in the reference, 1 in NVIDIA's submissions.

    Raises:
        ValueError: the warm-up is negative.
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
