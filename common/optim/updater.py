"""Interfaces of objects that apply gradients, and how several of them do one update together."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from common.optim.precision import LossScale


class Updater(Protocol):
    """Applies gradients.

    An iteration is ``begin``; for each micro-batch forward, ``arm`` before the backward pass of the last one,
    backward, ``collect``; then ``measure`` and, after all updaters have measured, ``write``. :func:`apply_gradients`
    calls the last two. ``write`` must not read the loss scale, which has adapted by then, and must not change
    metrics.
    """

    @property
    def loss_scale(self) -> LossScale | None:
        """Scale of the loss; None if it was not scaled. Several updaters may share it."""

    def begin(self) -> None:
        """Start an iteration: zero the gradients in place, and start to gather weights that other ranks updated."""

    def arm(self, part: nn.Module | None = None) -> None:
        """Allow reductions to start; called before the backward pass of the last micro-batch.

        Args:
            part: part of the model whose last backward pass comes next, while other parts have more; None for all.
        """

    def collect(self) -> None:
        """Process the gradient of a micro-batch; called after each backward pass."""

    def measure(self) -> Tensor:
        """Wait for the reduction and check the gradients; change no persistent state.

        Returns:
            0-d bool on the device, the same on every rank: whether a gradient is not finite.
        """

    def write(self, allowed: Tensor) -> None:
        """Update with the gradients that were measured; write nothing where ``allowed`` (0-d bool) is false."""

    def materialize(self) -> None:
        """Bring the model's weights up to date, before evaluation, checkpoint and export. Collective, idempotent."""

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """Return all persistent device tensors: masters, momentum, step counter."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name: full tensors on the CPU of the ranks that write it. Collective."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``, after the model was loaded."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Name to 0-d device tensor, about the last update; includes ``learning_rate`` if there is one."""


@runtime_checkable
class LimitedUpdater(Protocol):
    """Updater with a limited capacity, which counts on the device, in its metrics, how often it was exceeded."""

    def check_limits(self, metrics: MutableMapping[str, float]) -> None:
        """Remove the counts of an iteration from its metrics, and raise if a capacity was exceeded.

        Args:
            metrics: metrics of an iteration, means over the ranks, the same on all of them.

        Raises:
            SuiteError: a capacity was exceeded, so the iteration wrote nothing. The run must end.
        """


@runtime_checkable
class SendingUpdater(Updater, Protocol):
    """Updater that sends gradients or weights to the ranks that hold the same parameters."""

    def stop_sending(self) -> None:
        """Send no gradients and weights from the next iteration on. Only for measurements: ranks then differ.

        Everything else that couples ranks remains: sums of single numbers such as norms and flags, and exchanges of
        the model, such as those of embeddings or of a pipeline.
        """


@runtime_checkable
class StreamingUpdater(Updater, Protocol):
    """Updater whose state exceeds the memory of one rank or host: every rank writes its part of a checkpoint.

    Its ``state_dict`` has the remaining state, which all ranks load.
    """

    def save_shards(self, folder: Path) -> None:
        """Write this rank's part into separate files in ``folder``, durably. Not collective.

        Raises:
            OSError: a file cannot be written.
        """

    def load_shards(self, folder: Path) -> None:
        """Load this rank's part from the files of all ranks, whose number may differ; call after ``load_state_dict``.

        Raises:
            CheckpointError: something is missing or damaged, or belongs to another model.
        """


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
