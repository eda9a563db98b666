"""One training iteration: accumulated forward and backward passes, gradient reduction, update, and its result.

The iteration never waits for the device. One small device tensor, the *result*, sums over all ranks the values that the
host needs: metrics, overflow, and whether to stop. The trainer reads it a few steps later. All ranks read the same
numbers for the same step, so they make the same decisions.
"""

from __future__ import annotations

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
from common.optim.updater import LimitedUpdater, Updater, apply_gradients
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


def accumulate(loss: Callable[[Batch], Losses], loss_scale: LossScale | None = None) -> ForwardBackward:
    """Return forward and backward passes over micro-batches that add up the gradients.

    Args:
        loss: forward pass and loss of one micro-batch.
        loss_scale: factor on the loss before the backward pass. The optimizer that divides by it must have it too.

    Returns:
        A function of (micro-batches, arm, collect). It calls ``arm`` before the last backward pass, which makes the
        gradients final, and ``collect`` after each backward pass. It returns the metrics' means over the micro-batches,
        but the sum of :data:`SAMPLES`.
    """

    def forward_backward(micro_batches: Sequence[Batch], arm: Arm, collect: Callable[[], None]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for index, micro_batch in enumerate(micro_batches):
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
        names: names of the metrics.
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
    """

    chunk_graphs: PassGraphs | None = None
    rehearsing: Callable[[], AbstractContextManager[None]] | None = None

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
