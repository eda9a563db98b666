"""What a training step drives: the contract of everything that applies gradients, and how several do it together."""

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

    An iteration is ``begin``; for each micro-batch forward, ``arm`` before the backward pass of the last one, backward,
    ``collect``; then ``measure`` and, when all updaters have measured, ``write``. :func:`apply_gradients` does both.
    ``write`` does not read the loss scale, which has adapted by then, and changes no metric.
    """

    @property
    def loss_scale(self) -> LossScale | None:
        """What the loss was multiplied with; None where it was not. Several updaters may have the same one."""

    def begin(self) -> None:
        """Start an iteration: zero the gradients in place, start to gather weights that other ranks updated."""

    def arm(self, part: nn.Module | None = None) -> None:
        """Called before the backward pass of the last micro-batch: reductions may start from now on.

        Args:
            part: of the model, whose last backward pass it is while others have more to come; None for the last of all.
        """

    def collect(self) -> None:
        """Called after the backward pass of each micro-batch."""

    def measure(self) -> Tensor:
        """Wait for the reduction and look at the gradients; writes nothing that lasts.

        Returns:
            0-d bool on the device, the same on every rank: whether a gradient is not finite.
        """

    def write(self, allowed: Tensor) -> None:
        """Update with the gradients that were measured; writes nothing at all where ``allowed`` (0-d bool) is false."""

    def materialize(self) -> None:
        """Bring the model's weights up to date: before evaluation, checkpoint and export. Collective, idempotent."""

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """All persistent device tensors: masters, momentum, step counter."""

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name: full tensors on the CPU of the ranks that write it. Collective."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned, after the model was loaded."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Name to 0-d device tensor, about the last update; ``learning_rate`` at least, where there is one."""


@runtime_checkable
class LimitedUpdater(Protocol):
    """An :class:`Updater` that may meet more than it has room for, and counts that on the device, among its metrics."""

    def check_limits(self, metrics: MutableMapping[str, float]) -> None:
        """Take the counts of an iteration, which wrote nothing if there was too much, out of its metrics.

        Args:
            metrics: of an iteration, means over the ranks, the same on all of them.

        Raises:
            SuiteError: saying what was too much; the run is to end.
        """


@runtime_checkable
class SendingUpdater(Updater, Protocol):
    """An updater that sends gradients or weights to the ranks that hold the same parameters."""

    def stop_sending(self) -> None:
        """Send neither from the next iteration on. Only for measurements: the ranks' weights then differ.

        Everything else that couples ranks remains: sums of single numbers such as norms and flags, and exchanges that
        belong to the model, such as those of embeddings or of a pipeline.
        """


@runtime_checkable
class StreamingUpdater(Updater, Protocol):
    """An updater with more state than one rank holds, or a host: every rank brings its own part to a checkpoint.

    Its ``state_dict`` has the rest, which all ranks load.
    """

    def save_shards(self, folder: Path) -> None:
        """Write this rank's part into files of its own in ``folder``, durably; not collective.

        Raises:
            OSError: it cannot be written.
        """

    def load_shards(self, folder: Path) -> None:
        """Take over this rank's part from what all ranks wrote, however many they were; after ``load_state_dict``.

        Raises:
            CheckpointError: something is missing or damaged, or of another model.
        """


def apply_gradients(
    updaters: Sequence[Updater], skip: Tensor, measured: Callable[[Tensor], None] = lambda overflow: None
) -> Tensor:
    """Let all updaters write, or none of them. Capturable: nothing waits for the device.

    One gradient that is not finite, whosever it is, keeps every updater from writing; each loss scale adapts once. One
    updater alone decides with its own flag, without a kernel more.

    Args:
        updaters: in the order in which they write.
        skip: 0-d float32 on the device; where it is not 0 nothing is written, loss scales included.
        measured: called with the result before anything is written; the updaters' metrics are final then.

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
