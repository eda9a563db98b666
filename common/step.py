"""One training iteration: accumulation, forward, backward, gradient reduction, update, and its report.

The iteration never waits for the device. What the host needs to know of it (mean loss, overflow, whether any rank was
asked to stop, whether the target is reached) is summed over all ranks into one small device tensor, the *report*, which
the trainer reads a few steps later: every rank reads the same numbers of the same step and so decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.data.source import Batch
from common.distributed.layout import Layout
from common.optim.updater import Updater
from common.precision import LossScale
from common.workload import Losses

ForwardBackward = Callable[[Sequence[Batch], Callable[[], None], Callable[[], None]], dict[str, Tensor]]


def accumulate(loss: Callable[[Batch], Losses], loss_scale: LossScale | None = None) -> ForwardBackward:
    """Forward and backward over micro-batches whose gradients add up.

    Args:
        loss: forward pass and loss of one micro-batch.
        loss_scale: what the loss is multiplied with before the backward pass; the optimizer that divides holds it too.

    Returns:
        A function of (micro-batches, arm, collect) that calls ``arm`` before the last backward pass, from where on
        gradients are final and may be reduced, and ``collect`` after each; it returns the means of the metrics over
        the micro-batches.
    """

    def forward_backward(
        micro_batches: Sequence[Batch], arm: Callable[[], None], collect: Callable[[], None]
    ) -> dict[str, Tensor]:
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
        return {name: value / len(micro_batches) for name, value in sums.items()}

    return forward_backward


@dataclass(frozen=True)
class DeviceReport:
    """A report on the device.

    Attributes:
        values: float32 (3 + metrics,), summed over the ranks: stop flags, overflow, metrics, flags of a reached target.
        names: of the metrics.
    """

    values: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What one iteration tells the host: read when its device work is done, the same on all ranks."""

    metrics: dict[str, float]
    overflow: bool
    stop: bool
    reached: bool


class TrainStep:
    """One iteration over the micro-batches of one optimizer step. Capturable.

    Args:
        forward_backward: usually ``accumulate(workload.loss)``.
        updaters: what applies the gradients, in order.
        layout: the ranks whose reports are summed.

    Attributes:
        skip: 0-d float32 on the device; non-zero makes every updater write nothing (warm-up).
        stop: 0-d float32 on the device; non-zero asks all ranks to stop (set by a signal on any of them).
        reached: likewise; non-zero tells all ranks that the target is reached (set by the one that hears of it).
    """

    def __init__(self, forward_backward: ForwardBackward, updaters: Sequence[Updater], layout: Layout) -> None:
        self.forward_backward = forward_backward
        self.updaters = tuple(updaters)
        self.layout = layout
        self.skip = torch.zeros((), device=layout.device)
        self.stop = torch.zeros((), device=layout.device)
        self.reached = torch.zeros((), device=layout.device)
        # Asked for here, so that it exists on every rank before the first iteration.
        self._everyone = layout.group("pp", "dp", "cp", "tp") if layout.world_size > 1 else None

    def __call__(self, micro_batches: Sequence[Batch]) -> DeviceReport:
        """Run the iteration; returns its report."""
        for updater in self.updaters:
            updater.begin()
        metrics = self.forward_backward(micro_batches, self._arm, self._collect)
        for updater in self.updaters:
            updater.update(self.skip)
        told = [updater.metrics for updater in self.updaters]
        overflow = torch.stack([entry["overflow"].to(torch.float32) for entry in told]).amax()
        metrics = {**metrics, **_joined(told)}
        values = torch.stack([self.stop, overflow, *metrics.values(), self.reached])
        if self._everyone is not None:
            dist.all_reduce(values, group=self._everyone)
        return DeviceReport(values, tuple(metrics))

    def read(self, names: Sequence[str], values: Sequence[float]) -> Report:
        """The numbers of a report, ``values`` being its tensor's content on the host, by name."""
        ranks = self.layout.world_size
        metrics = {name: value / ranks for name, value in zip(names, values[2:-1], strict=True)}
        return Report(metrics=metrics, overflow=values[1] > 0, stop=values[0] > 0, reached=values[-1] > 0)

    def materialize(self) -> None:
        """Bring the model's weights up to date: before they are evaluated or saved, and at the end. Collective."""
        for updater in self.updaters:
            updater.materialize()

    def _arm(self) -> None:
        for updater in self.updaters:
            updater.arm()

    def _collect(self) -> None:
        for updater in self.updaters:
            updater.collect()


def _joined(told: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What the updaters tell beside overflow: waits are added up, all else is the first one's that has it."""
    joined: dict[str, Tensor] = {}
    for entry in told:
        for name, value in entry.items():
            if name == "comm_wait_ms" and name in joined:
                joined[name] = joined[name] + value
            elif name != "overflow" and name not in joined:
                joined[name] = value.to(torch.float32)
    return joined
