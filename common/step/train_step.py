"""One training iteration: accumulation, forward, backward, gradient reduction, update, and its result.

The iteration never waits for the device. What the host needs to know of it (mean loss, overflow, whether any rank was
asked to stop, whether the target is reached) is summed over all ranks into one small device tensor, the *result*, which
the trainer reads a few steps later: every rank reads the same numbers of the same step and so decides the same.
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
"""The metric of a micro-batch that counts its real samples, where these are not the batch's nominal ones."""


@dataclass(frozen=True)
class Losses:
    """What one micro-batch yields.

    Attributes:
        total: 0-d tensor that is differentiated. The gradients are summed over micro-batches and ranks; divided by the
            optimizer's ``grad_divisor`` they are the mean over the global batch.
        metrics: name to 0-d device tensor, reported as means over micro-batches and ranks; but :data:`SAMPLES` is
            added up over micro-batches and replicas, and takes the place of the nominal samples in log and rates.
    """

    total: Tensor
    metrics: dict[str, Tensor]


class Arm(Protocol):
    """Says that gradients will be final: those of a part of the model, or all that are not yet."""

    def __call__(self, part: nn.Module | None = None, /) -> None:
        """Before the last backward pass of ``part``, while others have more to come; None before the last of all."""


ForwardBackward = Callable[[Sequence[Batch], Arm, Callable[[], None]], dict[str, Tensor]]


def within(context: Callable[[], AbstractContextManager[None]], passes: ForwardBackward) -> ForwardBackward:
    """``passes`` within a context of its own in every iteration, such as that no weight changes in it."""

    def forward_backward(micro_batches: Sequence[Batch], arm: Arm, collect: Callable[[], None]) -> dict[str, Tensor]:
        with context():
            return passes(micro_batches, arm, collect)

    return forward_backward


def accumulate(loss: Callable[[Batch], Losses], loss_scale: LossScale | None = None) -> ForwardBackward:
    """Forward and backward over micro-batches whose gradients add up.

    Args:
        loss: forward pass and loss of one micro-batch.
        loss_scale: what the loss is multiplied with before the backward pass; the optimizer that divides holds it too.

    Returns:
        A function of (micro-batches, arm, collect) that calls ``arm`` before the last backward pass, from where on
        gradients are final and may be reduced, and ``collect`` after each; it returns the means of the metrics over
        the micro-batches, and the sum of :data:`SAMPLES`.
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
    """A result on the device.

    Attributes:
        values: float32 (3 + metrics,), summed over the ranks: stop flags, overflow, metrics, flags of a reached target.
        names: of the metrics.
    """

    values: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class StepResult:
    """The result of one iteration on the host: read when its device work is done, the same on all ranks.

    Attributes:
        metrics: means over the ranks.
        samples: real samples over all replicas; None where the nominal ones are.
        overflow, stop, reached: whether a rank said so.
    """

    metrics: dict[str, float]
    samples: int | None
    overflow: bool
    stop: bool
    reached: bool


class TrainStep:
    """One iteration over the micro-batches of one optimizer step. Capturable.

    Args:
        forward_backward: usually ``accumulate(workload.loss)``; a pipeline's (:mod:`common.step.pipeline`).
        updaters: what applies the gradients, in order; all of them write, or none.
        layout: the ranks whose results are summed.

    Attributes:
        skip: 0-d float32 on the device; non-zero makes every updater write nothing (warm-up).
        stop: 0-d float32 on the device; non-zero asks all ranks to stop (set by a signal on any of them).
        reached: likewise; non-zero tells all ranks that the target is reached (set by the one that hears of it).
        chunk_graphs: where ``forward_backward`` has graphs of its own; None where a graph has the whole iteration.
        rehearsing: within which ``forward_backward`` waits for no other stage
            (:meth:`common.step.pipeline.Pipeline.rehearsing`); None where there are no stages.
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
        # Asked for here, so that it exists on every rank before the first iteration.
        self._everyone = layout.group("pp", "dp", "cp", "tp") if layout.world_size > 1 else None

    def __call__(self, micro_batches: Sequence[Batch]) -> DeviceResult:
        """Run the iteration; returns its result."""
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
        """Start to sum the result over the ranks, which runs beside the update; on a rank alone it is there at once."""
        metrics = {**metrics, **_joined([updater.metrics for updater in self.updaters])}
        values = torch.stack([self.stop, overflow.to(torch.float32), *metrics.values(), self.reached])
        work = None
        if self._everyone is not None:
            work = dist.all_reduce(values, group=self._everyone, async_op=True)
        return DeviceResult(values, tuple(metrics)), work

    def read(self, names: Sequence[str], values: Sequence[float]) -> StepResult:
        """The numbers of a result, ``values`` being its tensor's content on the host, by name.

        Raises:
            SuiteError: an updater had more to do than it has room for.
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
        """Bring the model's weights up to date: before they are evaluated or saved, and at the end. Collective."""
        for updater in self.updaters:
            updater.materialize()

    def _arm(self, part: nn.Module | None = None, /) -> None:
        for updater in self.updaters:
            updater.arm() if part is None else updater.arm(part)

    def _collect(self) -> None:
        for updater in self.updaters:
            updater.collect()


def _joined(metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of the updaters: waits are added up, all else is the first one's that has it."""
    joined: dict[str, Tensor] = {}
    for entry in metrics:
        for name, value in entry.items():
            if name == "comm_wait_ms" and name in joined:
                joined[name] = joined[name] + value
            elif name not in joined:
                joined[name] = value.to(torch.float32)
    return joined
