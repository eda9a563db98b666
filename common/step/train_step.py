"""One training iteration: accumulated forward and backward passes, gradient reduction, update, and its result.

The iteration never waits for the device. One small device tensor, the *result*, sums over all ranks the values that the
host needs: metrics, overflow, and whether to stop. The trainer reads it a few steps later. All ranks read the same
numbers for the same step, so they make the same decisions.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.optim.precision import LossScale
from common.optim.updater import LimitedUpdater, Updater
from common.step.capture import PassGraphs

SAMPLES = "samples"
"""Metric that counts a micro-batch's real samples, used if they differ from its nominal samples."""


@dataclass(frozen=True)
class Losses:
    """Loss and metrics of one micro-batch.

    Attributes:
        total: 0-d tensor to differentiate. The gradients are summed over micro-batches and ranks and divided by the
            optimizer's ``grad_divisor``; the result must be the mean over the global batch.
        metrics: name to 0-d device tensor, reported as means over micro-batches and ranks. Exception: :data:`SAMPLES`
            is summed over micro-batches and replicas, and replaces the nominal samples in log and rates.
    """

    total: Tensor
    metrics: dict[str, Tensor]


class Arm(Protocol):
    """Callback that announces final gradients: those of a part of the model, or all remaining ones."""

    def __call__(self, part: nn.Module | None = None, /) -> None:
        """Call before the last backward pass of ``part``; None before the last backward pass of all."""


ForwardBackward = Callable[[Sequence[Batch], Arm, Callable[[], None]], dict[str, Tensor]]


def within(context: Callable[[], AbstractContextManager[None]], passes: ForwardBackward) -> ForwardBackward:
    """Return ``passes`` wrapped in a fresh context per iteration, such as one in which no weight may change."""

    def forward_backward(micro_batches: Sequence[Batch], arm: Arm, collect: Callable[[], None]) -> dict[str, Tensor]:
        with context():
            return passes(micro_batches, arm, collect)

    return forward_backward


def accumulate(
    loss: Callable[[Batch], Losses],
    loss_scale: LossScale | None = None,
    *,
    again: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> ForwardBackward:
    """Return forward and backward passes over micro-batches that add up the gradients.

    Args:
        loss_scale: factor on the loss before the backward pass. The optimizer that divides by it must have it too.
        again: context of each micro-batch after the first, such as one that reuses FP8 copies of the weights.

    Returns:
        A function of (micro-batches, arm, collect). It calls ``arm`` before the last backward pass, which makes the
        gradients final, and ``collect`` after each backward pass. It returns the metrics' means over the micro-batches,
        but the sum of :data:`SAMPLES`.
    """

    def forward_backward(micro_batches: Sequence[Batch], arm: Arm, collect: Callable[[], None]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for index, micro_batch in enumerate(micro_batches):
            with again() if index else contextlib.nullcontext():
                losses = loss(micro_batch)
                if index == len(micro_batches) - 1:
                    arm()
                total = losses.total if loss_scale is None else loss_scale.scale(losses.total)
                total.backward()
            collect()
            for name, value in losses.metrics.items():
                value = value.detach().to(torch.float32)
                sums[name] = sums[name] + value if name in sums else value
        return {name: value if name == SAMPLES else value / len(micro_batches) for name, value in sums.items()}

    return forward_backward


@dataclass(frozen=True)
class DeviceResult:
    """The result of one iteration on the device.

    Attributes:
        values: float32 (3 + metrics,), summed over the ranks: stop flag, overflow, metrics, target-reached flag.
    """

    values: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class StepResult:
    """The result of one iteration on the host, the same on all ranks.

    Attributes:
        metrics: means over the ranks.
        samples: real samples over all replicas; None if they equal the nominal samples.
        overflow, stop, reached: whether any rank has set the flag.
    """

    metrics: dict[str, float]
    samples: int | None
    overflow: bool
    stop: bool
    reached: bool


class TrainStep:
    """One iteration over the micro-batches of one optimizer step. Capturable.

    Args:
        forward_backward: ``accumulate(workload.loss)``, or a pipeline's passes (:mod:`common.step.pipeline`).
        updaters: apply the gradients, in order. Either all of them write, or none.
        layout: the ranks whose results are summed.

    Attributes:
        skip: 0-d float32 on the device; if non-zero, no updater writes (warm-up).
        stop: 0-d float32 on the device; non-zero asks all ranks to stop (set on a rank that receives a signal).
        reached: 0-d float32 on the device; non-zero tells all ranks that the target is reached (set on the rank that
            receives the score).
        chunk_graphs: separate graphs of ``forward_backward``; None if one graph holds the whole iteration.
        rehearsing: context in which ``forward_backward`` does not wait for other stages
            (:meth:`common.step.pipeline.Pipeline.rehearsing`); None without a pipeline.
        one_key: whether all micro-batches of an iteration have the same batch key.
    """

    chunk_graphs: PassGraphs | None = None
    rehearsing: Callable[[], AbstractContextManager[None]] | None = None
    one_key = False

    def __init__(self, forward_backward: ForwardBackward, updaters: Sequence[Updater], layout: Layout) -> None:
        self.forward_backward = forward_backward
        self.updaters = tuple(updaters)
        self._limited = [updater for updater in self.updaters if isinstance(updater, LimitedUpdater)]
        self.layout = layout
        self.skip = torch.zeros((), device=layout.device)
        self.stop = torch.zeros((), device=layout.device)
        self.reached = torch.zeros((), device=layout.device)
        # Create the group here, so that it exists on every rank before the first iteration.
        self._everyone = layout.group("pp", "dp", "cp", "tp") if layout.world_size > 1 else None

    def __call__(self, micro_batches: Sequence[Batch]) -> DeviceResult:
        """Run the iteration and return its result."""
        for updater in self.updaters:
            updater.begin()
        metrics = self.forward_backward(micro_batches, self._arm, self._collect)
        summed: list[tuple[DeviceResult, dist.Work | None]] = []
        apply_gradients(self.updaters, self.skip, lambda overflow: summed.append(self._sum(metrics, overflow)))
        ((result, work),) = summed
        if work is not None:
            work.wait()
        return result

    def _sum(self, metrics: Mapping[str, Tensor], overflow: Tensor) -> tuple[DeviceResult, dist.Work | None]:
        """Start to sum the result over the ranks, concurrently with the update. On a single rank, the work is None."""
        metrics = {**metrics, **_joined([updater.metrics for updater in self.updaters])}
        values = torch.stack([self.stop, overflow.to(torch.float32), *metrics.values(), self.reached])
        work = None
        if self._everyone is not None:
            work = dist.all_reduce(values, group=self._everyone, async_op=True)
        return DeviceResult(values, tuple(metrics)), work

    def read(self, names: Sequence[str], values: Sequence[float]) -> StepResult:
        """Return the named values of a result from ``values``, the content of its tensor on the host.

        Raises:
            SuiteError: an updater exceeded the capacity of a buffer.
        """
        ranks = self.layout.world_size
        metrics = {name: value / ranks for name, value in zip(names, values[2:-1], strict=True)}
        counted = metrics.pop(SAMPLES, None)
        for updater in self._limited:
            updater.check_limits(metrics)
        return StepResult(
            metrics=metrics,
            samples=None if counted is None else round(counted * self.layout.size("dp")),
            overflow=values[1] > 0,
            stop=values[0] > 0,
            reached=values[-1] > 0,
        )

    def materialize(self) -> None:
        """Bring the model's weights up to date before an evaluation, before a checkpoint, or at the end. Collective."""
        for updater in self.updaters:
            updater.materialize()

    def _arm(self, part: nn.Module | None = None, /) -> None:
        for updater in self.updaters:
            updater.arm() if part is None else updater.arm(part)

    def _collect(self) -> None:
        for updater in self.updaters:
            updater.collect()


def apply_gradients(
    updaters: Sequence[Updater], skip: Tensor, measured: Callable[[Tensor], None] = lambda overflow: None
) -> Tensor:
    """Let all updaters write, or none of them. Capturable: nothing waits for the device.

    One gradient that is not finite, in any updater, stops all updaters from writing. Each loss scale adapts once. A
    single updater uses its own flag, without an additional kernel.

    Args:
        updaters: in the order in which they write.
        skip: 0-d fp32 on the device; if it is not 0, nothing is written, including loss scales.
        measured: called with the result before anything is written, when the updaters' metrics are final.

    Returns:
        0-d bool on the device: whether a gradient of any updater is not finite.
    """
    overflow = functools.reduce(operator.or_, [updater.measure() for updater in updaters])
    allowed = (skip == 0) & ~overflow
    for loss_scale in dict.fromkeys(updater.loss_scale for updater in updaters):
        if loss_scale is not None:
            loss_scale.update(overflow, skip != 0)
    measured(overflow)
    for updater in updaters:
        updater.write(allowed)
    return overflow


def _joined(metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the metrics of the updaters: sum the communication waits, otherwise keep the first updater's value."""
    joined: dict[str, Tensor] = {}
    for entry in metrics:
        for name, value in entry.items():
            if name == "comm_wait_ms" and name in joined:
                joined[name] = joined[name] + value
            elif name not in joined:
                joined[name] = value.to(torch.float32)
    return joined


@dataclass(frozen=True)
class Finished:
    """An iteration that the device has finished.

    Attributes:
        step: number of the iteration in the run, from 1.
        samples: nominal training samples up to and including this iteration, over all ranks.
        ended: estimated end, in seconds of the host's ``time.perf_counter``.
        step_ms: milliseconds since the previous iteration ended; 0 for the first.
        data_wait_ms: milliseconds that the host waited for the iteration's data.
    """

    step: int
    samples: int
    result: StepResult
    ended: float
    step_ms: float
    data_wait_ms: float


@dataclass
class _Pending:
    step: int
    samples: int
    data_wait_ms: float
    names: tuple[str, ...]
    host: Tensor
    done: torch.cuda.Event | None
    launched: float


class StepsInFlight:
    """A queue of launched iterations. Reading a result waits only for the oldest iteration, through a CUDA event."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._queue: deque[_Pending] = deque()
        self._free: list[Tensor] = []
        self._before: _Pending | None = None
        self._ended = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, step: int, samples: int, result: DeviceResult, data_wait_ms: float) -> None:
        """Queue an asynchronous copy of ``result`` to the host on the current stream.

        Args:
            samples: training samples up to its end.
            data_wait_ms: milliseconds that the host waited for the iteration's data.
        """
        values = result.values
        if values.device.type == "cuda":
            fitting = [host for host in self._free if host.shape == values.shape]
            host = fitting[0] if fitting else torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._free = [other for other in self._free if other is not host]
            host.copy_(values, non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        else:
            host, done = values.clone(), None
        self._queue.append(_Pending(step, samples, data_wait_ms, result.names, host, done, time.perf_counter()))

    def pop(self) -> Finished:
        """Wait for the oldest iteration and return its result."""
        entry = self._queue.popleft()
        waited = entry.done is not None and not entry.done.query()
        if entry.done is not None:
            entry.done.synchronize()
        now = time.perf_counter()
        result = self._step.read(entry.names, entry.host.tolist())
        if entry.done is not None:
            self._free.append(entry.host)
        before, self._before = self._before, entry
        step_ms = 0.0
        if before is not None:
            if before.done is not None and entry.done is not None:
                step_ms = before.done.elapsed_time(entry.done)
            else:
                step_ms = (entry.launched - before.launched) * 1e3
        if entry.done is None:
            self._ended = entry.launched
        elif waited or before is None:
            self._ended = now
        else:  # it ended before this call: add the device's step time to the previous end
            self._ended = min(now, max(entry.launched, self._ended + step_ms / 1e3))
        return Finished(entry.step, entry.samples, result, self._ended, step_ms, entry.data_wait_ms)
