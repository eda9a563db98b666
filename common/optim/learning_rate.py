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


def warmup_then_constant(
    base: float,
    initial: float,
    warmup_steps: int,
    first_step: Literal[0, 1] = 1,
    steps_per_update: int = 1,
    offset: int = 0,
) -> Schedule:
    """Linear warm-up from ``initial`` to ``base``, then ``base`` for ever.

    With s = counter, k = steps_per_update, W = warmup_steps and n = (floor(s / k) + first_step) * k:
    initial + (base - initial) * min((n + offset) / (W + offset), 1). The MLPerf 3D U-Net reference changes the rate at
    the start of each epoch, and its first epoch counts as 1: k is the steps of an epoch. NVIDIA's submissions change it
    at each step, the first being 1, after an offset of 20: their counter keeps the iterations that they warm up with,
    and their warm-up is as much longer.

    Args:
        base: learning rate at the end of the warm-up and after it.
        initial: learning rate that the warm-up starts from.
        warmup_steps: W, in optimizer steps; 0 is no warm-up, and ``offset`` then counts for nothing.
        first_step: what the first update, or the first ``steps_per_update`` of them, count as.
        steps_per_update: k, optimizer steps between two changes of the rate.
        offset: steps by which the warm-up is longer, and that it is taken to have done before the first update.

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


def linear_from_zero(
    base: float,
    training_steps: int,
    warmup_steps: int = 0,
    start_warmup_step: int = 0,
    first_step_with_offset: Literal[0, 1] = 0,
) -> Schedule:
    """Linear decay to 0, counted from step 0 and not from the end of the warm-up, which may have begun before step 0.

    With s = counter, N = training_steps, W = warmup_steps and S = start_warmup_step: base * (s - S) / W while
    s - S < W, then base * (1 - min(s, N) / N): at the end of the warm-up the learning rate drops to the line. This is
    the MLPerf BERT reference's. NVIDIA's submissions put s + 1 in place of s where S is not 0; the 1e-6 that they add
    to W is below float32's resolution and left out.

    Args:
        base: learning rate at the start of the line.
        training_steps: N.
        warmup_steps: W; 0 is no warm-up, and ``start_warmup_step`` then counts for nothing.
        start_warmup_step: S, 0 or below: updates that the warm-up is taken to have done before the first.
        first_step_with_offset: what the first update counts as where S is not 0: 0 in the reference, 1 in NVIDIA's.

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
    """Linear warm-up from 0, then half a cosine from ``base`` to 0, where it stays.

    With s = counter, W = warmup_steps and T = training_steps: base * s / W while s < W, then
    base * (1 + cos(pi * min((s - W) / (T - W), 1))) / 2 (Loshchilov and Hutter, arXiv:1608.03983, without restarts).

    Args:
        base: the highest learning rate.
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
    """Linear warm-up, whose first update is above 0, then half a cosine from ``base`` to ``end``, where it stays.

    With s = counter, W = warmup_steps and T = training_steps: base * (s + 1) / (W + 1) while s <= W, then
    end + (base - end) * (1 + cos(pi * min((s - W) / (T - W), 1))) / 2. It is NeMo's ``CosineAnnealing``, whose warm-up
    has W + 1 updates, the last of them with ``base``.

    Args:
        base: the highest learning rate.
        end: the one at the end of the cosine.
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
    """Linear warm-up from 0, then half a cosine from ``base`` to ``end``, where it stays, both counted in samples.

    With t = consumed + (counter - first_update) * global_batch, the samples before an update, W and D:
    base * t / W while t <= W, then end + (base - end) * (1 + cos(pi * min((t - W) / (D - W), 1))) / 2. It is
    Megatron-LM's scheduler, whose first update of all has the rate 0.

    Args:
        base: the highest learning rate.
        end: the one at the end of the cosine.
        warmup_samples: W; 0 starts at ``base``.
        decay_samples: D, with the warm-up's.
        global_batch: samples of an update.
        consumed: samples before the first update of this training, which goes on with an earlier one.
        first_update: what the counter shows at that update.

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
    """Linear warm-up from 0, a plateau, then polynomial decay; between its regions the rate is held where it was.

    With s = counter + first_step, W, S and D: base * s / W while s < W; base * ((D - (s - S)) / D) ** power while
    S <= s < S + D; elsewhere what the step before had. So the plateau is base * (W - 1) / W and the end is
    base / D ** power; without decay steps the rate is base from W on. This is the MLPerf DLRM reference's scheduler,
    whose first update counts as 1 and whose floor of 1e-7 no published run reaches; HugeCTR's on the GPU counts from 0.

    Args:
        base: the learning rate that the warm-up heads for.
        warmup_steps: W; 0 is no warm-up.
        decay_start_step: S.
        decay_steps: D; 0 is no decay, and ``decay_start_step`` then counts for nothing.
        power: exponent of the decay.
        first_step: what the first update counts as.

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
    """Linear warm-up, a plateau, then the same factor at the start of each epoch, and a floor under it all.

    With s = counter + 1, epoch e = ceil(s / steps_per_epoch), W and H the steps of warm-up and plateau:
    base * (s + 1) / (W + 1) while s < W; base while s < W + H; then base * rate ** (e - warmup_epochs - hold_epochs);
    never less than the floor. So the first step has base * 2 / (W + 1), and step W + H, the last of an epoch, still
    has base. This is the MLPerf RNN-T reference's, whose logs call the rate per epoch the power of a polynomial.
    Counted are updates that were made, so an overflow moves all that follows by its one step.

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
