"""Interfaces of objects that apply gradients."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from common.optim.precision import LossScale


class Updater(Protocol):
    """Applies gradients.

    An iteration is ``begin``; for each micro-batch forward, ``arm`` before the backward pass of the last one,
    backward, ``collect``; then ``measure`` and, after all updaters have measured, ``write``. ``write`` must not read
    the loss scale, which has adapted by then, and must not change metrics.
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
        """Let the current stream wait for the reduction, and check the gradients; change no persistent state.

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
