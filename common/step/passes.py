"""The passes of a stage's chunks over one micro-batch, whoever brings and takes what chunks hand on.

A chunk's result is handed on and then only its place in the autograd graph is kept, so that its memory is free as soon
as it has been sent, unless the chunk itself keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from common.data.batches import Batch
from common.distributed.pipeline.order import Unit
from common.optim.precision import LossScale
from common.step.train_step import Losses

Made = Tensor | dict[str, Tensor]
"""What a chunk hands on to the next part of the model, or the metrics of the losses where there is none."""


def nothing() -> None:
    """Nothing is to be done."""


@dataclass(frozen=True)
class Chunk:
    """What a stage runs at once.

    Attributes:
        module: has the chunk's parameters, and no others: their gradients are final after its last backward pass.
        forward: the chunk on what the part of the model before it has handed on, None for the first part of all, and a
            micro-batch; what is handed on to the next part, or the losses if there is none.
        prepare: what comes once in a step, before the chunk's first forward pass and not in its graph: wait for weights
            that are on their way, and cast them. It may be called again in the same step. Only graphs of chunks need
            it, see :mod:`common.step.chunk_graphs`.
        begin_backward: what a backward pass in a graph of its own begins with, as it follows on any other pass.
    """

    module: nn.Module
    forward: Callable[[Tensor | None, Batch], Tensor | Losses]
    prepare: Callable[[], None] = nothing
    begin_backward: Callable[[], None] = nothing


@dataclass(frozen=True)
class Passed:
    """What a backward pass begins and ends with: the chunk's input, and its result's place in the graph or the loss."""

    source: Tensor | None
    result: GradientEdge | Tensor


class Passes(Protocol):
    """Runs the units of a stage."""

    def begin(self, units: Sequence[Unit]) -> None:
        """An iteration of these units begins."""

    def forward(self, unit: Unit, source: Tensor | None, batch: Batch) -> Made:
        """The forward pass of a chunk.

        Args:
            unit: which.
            source: what the part of the model before it has handed on.
            batch: the micro-batch.

        Returns:
            What nothing writes to again.
        """

    def backward(self, unit: Unit, gradient: Tensor | None, final: bool) -> Tensor | None:
        """The backward pass of a chunk.

        Args:
            unit: which.
            gradient: of what the chunk has handed on.
            final: whether it is the chunk's last one, for which its parameters are armed.

        Returns:
            The gradient of ``source``, which nothing writes to again.
        """


def forward_pass(
    number: int, chunk: Chunk, source: Tensor | None, batch: Batch, ends: bool, loss_scale: LossScale | None
) -> tuple[Passed, Made]:
    """Run a chunk forward.

    Args:
        number: of the chunk, for messages.
        chunk: see there.
        source: a leaf that requires gradients; None for the first part of the model.
        batch: the micro-batch.
        ends: it is the last part of the model.
        loss_scale: what the loss is multiplied with.

    Raises:
        ValueError: the last part has no losses, or another one has.
    """
    made = chunk.forward(source, batch)
    if isinstance(made, Losses) != ends:
        raise ValueError(
            f"chunk {number} {'is the last part of the model and has' if ends else 'is not the last part and'} "
            f"{'no losses' if ends else 'has losses'}"
        )
    if isinstance(made, Losses):
        total = made.total if loss_scale is None else loss_scale.scale(made.total)
        return Passed(source, total), {name: value.detach() for name, value in made.metrics.items()}
    return Passed(source, get_gradient_edge(made)), made


def backward_pass(number: int, passed: Passed, gradient: Tensor | None) -> Tensor | None:
    """Run a chunk backward, once: gradients are added to those of its parameters, and that of its source is returned.

    Args:
        number: of the chunk, for messages.
        passed: what the forward pass has left.
        gradient: of what it handed on; None of a loss.

    Raises:
        ValueError: the chunk does not depend on its source.
    """
    result: Any = passed.result  # PyTorch's type stubs know no list that may hold either
    torch.autograd.backward([result], [gradient])
    if passed.source is None:
        return None
    found, passed.source.grad = passed.source.grad, None
    if found is None:
        raise ValueError(f"chunk {number} does not depend on what the part of the model before it hands on")
    return found


class EagerPasses:
    """Runs every pass as it comes.

    Args:
        chunks: of the stage.
        ends: of each chunk whether it is the last part of the model.
        loss_scale: what the loss is multiplied with before the backward pass.
    """

    def __init__(self, chunks: Sequence[Chunk], ends: Sequence[bool], loss_scale: LossScale | None) -> None:
        self._chunks, self._ends, self._loss_scale = tuple(chunks), tuple(ends), loss_scale
        self._passed: dict[tuple[int, int], Passed] = {}

    def begin(self, units: Sequence[Unit]) -> None:
        """See :class:`Passes`."""
        self._passed = {}

    def forward(self, unit: Unit, source: Tensor | None, batch: Batch) -> Made:
        """See :class:`Passes`."""
        if source is not None:
            source.requires_grad_()
        number = unit.chunk
        passed, made = forward_pass(
            number, self._chunks[number], source, batch, self._ends[number], self._loss_scale
        )  # fmt: skip
        self._passed[number, unit.micro_batch] = passed
        return made

    def backward(self, unit: Unit, gradient: Tensor | None, final: bool) -> Tensor | None:
        """See :class:`Passes`."""
        return backward_pass(unit.chunk, self._passed.pop((unit.chunk, unit.micro_batch)), gradient)
