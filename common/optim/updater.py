"""What a training step drives: the contract of everything that applies gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class Updater(Protocol):
    """Applies gradients.

    An iteration is ``begin``; for each micro-batch forward, ``arm`` before the backward pass of the last one, backward,
    ``collect``; then ``update``.
    """

    def begin(self) -> None:
        """Start an iteration: zero the gradients in place, start to gather weights that other ranks updated."""

    def arm(self) -> None:
        """Called before the backward pass of the last micro-batch: reductions may start from now on."""

    def collect(self) -> None:
        """Called after the backward pass of each micro-batch."""

    def update(self, skip: Tensor) -> None:
        """Wait for the reduction and update; ``skip`` (0-d float32 device tensor) != 0 writes nothing at all."""

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
        """Name to 0-d device tensor, about the last update; ``learning_rate`` and ``overflow`` at least."""
