"""Learning-rate schedules that run on the device.

A schedule maps the optimizer's step counter (0-d int64 device tensor: number of applied updates, from 0) to the
learning rate (0-d fp32 device tensor). Nothing waits for the device, so a schedule can be part of a captured
iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """Return a schedule with the same learning rate at every step."""

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
    """Return a schedule with linear warm-up from 0 to ``base``, then polynomial decay to ``end``.

    With s = counter + first_step, W = warmup_steps and D = total_steps - W + 1 - first_step: base * s / W while s <=
    W, then end + (base - end) * (1 - min((s - W) / D, 1)) ** power. The first of the ``total_steps`` updates has s =
    first_step. The MLPerf ResNet reference in TensorFlow counts from 0 (its first update has learning rate 0);
    NVIDIA's submissions count from 1.

    After the decay the rate stays at ``end``, as in the reference. NVIDIA's polynomial goes on, and rises again with
    an even power. We differ on purpose: only a run that did not converge in time gets there, and a rising rate would
    not help it.

    Args:
        base: learning rate at the end of the warm-up.
        end: learning rate at the end of the decay.
        power: exponent of the decay.
        warmup_steps: W; 0 starts at ``base``.
        total_steps: steps of warm-up and decay together.
        first_step: s of the first update.

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


def warmup_then_constant(
    base: float,
    initial: float,
    warmup_steps: int,
    first_step: Literal[0, 1] = 1,
    steps_per_update: int = 1,
    offset: int = 0,
) -> Schedule:
    """Return a schedule with linear warm-up from ``initial`` to ``base``, then constant ``base``.

    With s = counter, k = steps_per_update, W = warmup_steps and n = (floor(s / k) + first_step) * k: initial + (base
    - initial) * min((n + offset) / (W + offset), 1). The MLPerf 3D U-Net reference changes the rate at the start of
    each epoch (k = steps per epoch), and its first epoch counts as 1. NVIDIA's submissions change it at each step,
    from 1, with an offset of 20: their counter includes the iterations before the timed run, and their warm-up is
    longer by this number.

    Args:
        base: learning rate at the end of the warm-up and after it.
        initial: learning rate at the start of the warm-up.
        warmup_steps: W, in optimizer steps; 0 disables the warm-up and ``offset``.
        first_step: index of the first update, or of the first ``steps_per_update`` updates.
        steps_per_update: k, optimizer steps between two changes of the rate.
        offset: steps that the warm-up has done before the first update; it is longer by as many.

    Raises:
        ValueError: a length is negative, or ``steps_per_update`` is not positive.
    """
    if warmup_steps < 0 or offset < 0 or steps_per_update < 1:
        raise ValueError(
            f"warmup_steps={warmup_steps} >= 0, offset={offset} >= 0 and steps_per_update={steps_per_update} >= 1 "
            "must hold"
        )
    if warmup_steps == 0:
        return constant(base)

    def schedule(step: Tensor) -> Tensor:
        count = (step.div(steps_per_update, rounding_mode="floor") + first_step) * steps_per_update
        done = ((count + offset).to(torch.float64) / (warmup_steps + offset)).clamp(max=1.0)
        return (initial + (base - initial) * done).to(torch.float32)

    return schedule


def stepwise(
    base: float,
    initial: float,
    warmup_epochs: int,
    boundaries: Sequence[int],
    factors: Sequence[float],
    steps_per_epoch: int,
) -> Schedule:
    """Return a schedule that is constant within an epoch: linear warm-up, then a factor from each boundary on.

    With e = floor(counter / steps_per_epoch) and W = warmup_epochs: initial + (base - initial) * e / W while e < W,
    then base * f, where f is the factor of the last boundary that is at most e, or 1 before the first. This is the
    scheduler of NVIDIA's CosmoFlow submissions; a boundary of the MLPerf HPC reference holds one epoch later.

    Args:
        base: learning rate after the warm-up.
        initial: learning rate of the first epoch; unused without warm-up.
        warmup_epochs: W.
        boundaries: first epochs of the factors, ascending.
        factors: one factor of ``base`` for each boundary.
        steps_per_epoch: optimizer steps of an epoch.

    Raises:
        ValueError: the boundaries do not ascend, or have another number than the factors.
    """
    if len(boundaries) != len(factors) or any(early >= late for early, late in pairwise(boundaries)):
        raise ValueError(f"boundaries={list(boundaries)}: ascending, one for each of factors={list(factors)}")

    def schedule(step: Tensor) -> Tensor:
        epoch = step.div(steps_per_epoch, rounding_mode="floor").to(torch.float64)
        rate = torch.full_like(epoch, base)
        for boundary, factor in zip(boundaries, factors, strict=True):
            rate = torch.where(epoch >= boundary, base * factor, rate)
        if warmup_epochs:
            rate = torch.where(epoch < warmup_epochs, initial + (base - initial) * epoch / warmup_epochs, rate)
        return rate.to(torch.float32)

    return schedule


def linear_from_zero(
    base: float,
    training_steps: int,
    warmup_steps: int = 0,
    start_warmup_step: int = 0,
    first_step_with_offset: Literal[0, 1] = 0,
) -> Schedule:
    """Return a schedule with linear decay to 0 that counts from step 0, not from the end of the warm-up.

    With s = counter, N = training_steps, W = warmup_steps and S = start_warmup_step: base * (s - S) / W while s - S <
    W, then base * (1 - min(s, N) / N). At the end of the warm-up the learning rate drops to the line. The MLPerf BERT
    reference uses this schedule. NVIDIA's submissions use s + 1 for s if S is not 0. They also add 1e-6 to W, which
    we leave out because it is below the resolution of fp32.

    Args:
        base: learning rate at the start of the line.
        training_steps: N.
        warmup_steps: W; 0 disables the warm-up and ``start_warmup_step``.
        start_warmup_step: S, 0 or negative: the warm-up has done -S updates before the first.
        first_step_with_offset: index of the first update if S is not 0: 0 in the reference, 1 in NVIDIA's submissions.

    Raises:
        ValueError: no training step, a negative warm-up, or one that starts after the first update.
    """
    if training_steps < 1:
        raise ValueError(f"training_steps={training_steps}: the decay takes at least one step")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: a warm-up cannot be negative")
    if start_warmup_step > 0:
        raise ValueError(f"start_warmup_step={start_warmup_step}: above 0 the learning rate would start below 0")
    has_offset = warmup_steps > 0 and start_warmup_step != 0
    first_step = first_step_with_offset if has_offset else 0

    def schedule(step: Tensor) -> Tensor:
        count = step.to(torch.float64) + first_step
        decay = base * (1.0 - count.clamp(max=training_steps) / training_steps)
        if warmup_steps == 0:
            return decay.to(torch.float32)
        done = count - start_warmup_step
        return torch.where(done < warmup_steps, base * done / warmup_steps, decay).to(torch.float32)

    return schedule


def cosine(base: float, training_steps: int, warmup_steps: int = 0) -> Schedule:
    """Return a schedule with linear warm-up from 0, then half a cosine from ``base`` to 0, where it stays.

    With s = counter, W = warmup_steps and T = training_steps: base * s / W while s < W, then base * (1 + cos(pi *
    min((s - W) / (T - W), 1))) / 2 (Loshchilov and Hutter, arXiv:1608.03983, without restarts).

    Args:
        base: highest learning rate.
        training_steps: T.
        warmup_steps: W.

    Raises:
        ValueError: the warm-up is negative, or leaves no step.
    """
    if not 0 <= warmup_steps < training_steps:
        raise ValueError(f"warmup_steps={warmup_steps}: at least 0 and fewer than training_steps={training_steps}")

    def schedule(step: Tensor) -> Tensor:
        count = step.to(torch.float64)
        done = ((count - warmup_steps) / (training_steps - warmup_steps)).clamp(max=1.0)
        decay = 0.5 * base * (1.0 + torch.cos(math.pi * done))
        if warmup_steps == 0:
            return decay.to(torch.float32)
        return torch.where(count < warmup_steps, base * count / warmup_steps, decay).to(torch.float32)

    return schedule


def cosine_to(base: float, end: float, training_steps: int, warmup_steps: int = 0) -> Schedule:
    """Return a schedule with linear warm-up, then half a cosine from ``base`` to ``end``, where it stays.

    With s = counter, W = warmup_steps and T = training_steps: base * (s + 1) / (W + 1) while s <= W, then end + (base
    - end) * (1 + cos(pi * min((s - W) / (T - W), 1))) / 2. This is NeMo's ``CosineAnnealing``: its first update has a
    rate above 0, and its warm-up has W + 1 updates, the last of them with ``base``.

    Args:
        base: highest learning rate.
        end: learning rate at the end of the cosine.
        training_steps: T.
        warmup_steps: W.

    Raises:
        ValueError: the warm-up is negative, or leaves no step.
    """
    if not 0 <= warmup_steps < training_steps:
        raise ValueError(f"warmup_steps={warmup_steps}: at least 0 and fewer than training_steps={training_steps}")

    def schedule(step: Tensor) -> Tensor:
        count = step.to(torch.float64)
        done = ((count - warmup_steps) / (training_steps - warmup_steps)).clamp(max=1.0)
        decay = end + 0.5 * (base - end) * (1.0 + torch.cos(math.pi * done))
        warmup = base * (count + 1.0) / (warmup_steps + 1)
        return torch.where(count <= warmup_steps, warmup, decay).to(torch.float32)

    return schedule


def cosine_of_samples(
    base: float,
    end: float,
    warmup_samples: int,
    decay_samples: int,
    global_batch: int,
    consumed: int = 0,
    first_update: int = 0,
) -> Schedule:
    """Return a schedule with linear warm-up from 0, then half a cosine to ``end``, both counted in samples.

    With t = consumed + (counter - first_update) * global_batch, the samples before an update, W and D: base * t / W
    while t <= W, then end + (base - end) * (1 + cos(pi * min((t - W) / (D - W), 1))) / 2. This is Megatron-LM's
    scheduler, whose very first update has learning rate 0.

    Args:
        base: highest learning rate.
        end: learning rate at the end of the cosine, and after it.
        warmup_samples: W; 0 starts at ``base``.
        decay_samples: D, which includes the warm-up.
        global_batch: samples per update.
        consumed: samples before the first update of this training, if it continues an earlier one.
        first_update: value of the counter at that update.

    Raises:
        ValueError: the warm-up is negative, or leaves no sample.
    """
    if not 0 <= warmup_samples < decay_samples:
        raise ValueError(f"warmup_samples={warmup_samples}: at least 0 and fewer than decay_samples={decay_samples}")

    def schedule(step: Tensor) -> Tensor:
        samples = consumed + (step.to(torch.float64) - first_update) * global_batch
        done = ((samples - warmup_samples) / (decay_samples - warmup_samples)).clamp(max=1.0)
        decay = end + 0.5 * (base - end) * (1.0 + torch.cos(math.pi * done))
        if warmup_samples == 0:
            return decay.to(torch.float32)
        return torch.where(samples <= warmup_samples, base * samples / warmup_samples, decay).to(torch.float32)

    return schedule


def held_polynomial(
    base: float,
    warmup_steps: int,
    decay_start_step: int,
    decay_steps: int,
    power: float = 2.0,
    first_step: Literal[0, 1] = 1,
) -> Schedule:
    """Return a schedule with linear warm-up from 0, a plateau, then polynomial decay and a constant end.

    With s = counter + first_step, W, S and D: base * s / W while s < W; base * ((D - (s - S)) / D) ** power while S
    <= s < S + D; at every other step the rate of the step before. So the plateau is base * (W - 1) / W and the end is
    base / D ** power. Without decay steps the rate is base from W on. This is the scheduler of the MLPerf DLRM
    reference, whose first update counts as 1; we leave out its floor of 1e-7, which no published run reaches.
    HugeCTR's GPU scheduler counts from 0.

    Args:
        base: learning rate that the warm-up approaches.
        warmup_steps: W; 0 disables the warm-up.
        decay_start_step: S.
        decay_steps: D; 0 disables the decay and ``decay_start_step``.
        power: exponent of the decay.
        first_step: s of the first update.

    Raises:
        ValueError: a length is negative, or the decay starts within the warm-up.
    """
    if warmup_steps < 0 or decay_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}, decay_steps={decay_steps}: not negative")
    if decay_steps and decay_start_step < warmup_steps:
        raise ValueError(f"decay_start_step={decay_start_step}: not before the end of the warm-up, {warmup_steps}")
    held = base * (warmup_steps - 1) / warmup_steps if warmup_steps and decay_steps else base

    def schedule(step: Tensor) -> Tensor:
        count = step.to(torch.float64) + first_step
        rate = torch.full_like(count, held)
        if decay_steps:
            left = decay_steps - (count - decay_start_step)
            decay = base * (left.clamp(min=1.0) / decay_steps) ** power
            rate = torch.where(count >= decay_start_step, decay, rate)
        if warmup_steps:
            rate = torch.where(count < warmup_steps, base * count / warmup_steps, rate)
        return rate.to(torch.float32)

    return schedule


def held_exponential(
    base: float,
    floor: float,
    rate_per_epoch: float,
    steps_per_epoch: int,
    warmup_epochs: int,
    hold_epochs: int,
) -> Schedule:
    """Return a schedule with linear warm-up, a plateau, then exponential decay per epoch down to a floor.

    With s = counter + 1, epoch e = ceil(s / steps_per_epoch), W and H the steps of warm-up and plateau: base * (s +
    1) / (W + 1) while s < W; base while s < W + H; then base * rate ** (e - warmup_epochs - hold_epochs); never less
    than the floor. So the first step has base * 2 / (W + 1), and step W + H, the last of an epoch, still has base.
    This is the schedule of the MLPerf RNN-T reference, whose logs call the rate per epoch the power of a polynomial.
    Only applied updates count, so an overflow delays the rest of the schedule by one step.

    Args:
        base: learning rate of the plateau.
        floor: the lowest learning rate.
        rate_per_epoch: factor from one epoch of the decay to the next.
        steps_per_epoch: optimizer steps of an epoch.
        warmup_epochs, hold_epochs: lengths of warm-up and plateau.

    Raises:
        ValueError: a length is negative, an epoch has no step, or the rate is not positive.
    """
    if steps_per_epoch < 1 or warmup_epochs < 0 or hold_epochs < 0 or not rate_per_epoch > 0:
        raise ValueError(
            f"steps_per_epoch={steps_per_epoch} >= 1, warmup_epochs={warmup_epochs} >= 0, "
            f"hold_epochs={hold_epochs} >= 0 and rate_per_epoch={rate_per_epoch} > 0 must hold"
        )
    warmup_steps = warmup_epochs * steps_per_epoch
    before_decay = warmup_epochs + hold_epochs

    def schedule(step: Tensor) -> Tensor:
        count = step.to(torch.float64) + 1.0
        warmup = ((count + 1.0) / (warmup_steps + 1.0)).where(count < warmup_steps, 1.0)
        epochs_of_decay = ((count / steps_per_epoch).ceil() - before_decay).clamp(min=0.0)
        return (base * warmup * rate_per_epoch**epochs_of_decay).clamp(min=floor).to(torch.float32)

    return schedule


def reference_steps(
    train_samples: int,
    global_batch: int,
    epochs: int,
    warmup_epochs: int,
    evaluation_offset: int = 0,
    evaluation_period: int = 4,
) -> ScheduleSteps:
    """Return the schedule lengths of the MLPerf ResNet reference (TensorFlow 2), for ``polynomial(first_step=0)``.

    An epoch has floor(train_samples / global_batch) steps. The epochs are rounded up so that the last one is
    evaluated: offset + ceil((epochs - offset) / period) * period.
    """
    steps_per_epoch = train_samples // global_batch
    blocks = -(-(epochs - evaluation_offset) // evaluation_period)
    rounded = evaluation_offset + blocks * evaluation_period
    return ScheduleSteps(steps_per_epoch, warmup_epochs * steps_per_epoch, rounded * steps_per_epoch)


def nvidia_steps(
    train_samples: int, micro_batches: int, micro_batch: int, epochs: int, warmup_epochs: int
) -> ScheduleSteps:
    """Return the schedule lengths of NVIDIA's ResNet submissions, for ``polynomial(first_step=1)``.

    An epoch has ceil(floor(train_samples / micro_batches) / micro_batch) steps.

    Args:
        train_samples: size of the training set.
        micro_batches: micro-batches in one step: ranks times gradient accumulation steps.
        micro_batch: samples in each.
        epochs: epochs until the end of the decay.
        warmup_epochs: epochs of warm-up.
    """
    steps_per_epoch = math.ceil(train_samples // micro_batches / micro_batch)
    return ScheduleSteps(steps_per_epoch, warmup_epochs * steps_per_epoch, epochs * steps_per_epoch)
