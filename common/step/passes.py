"""Forward and backward passes of a stage's chunks over one micro-batch, without the transfers between stages.

After a forward pass, only the result's gradient edge in the autograd graph is kept. The result's memory is thus free as
soon as it has been sent, unless the chunk itself keeps it.
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
"""Result of a chunk's forward pass: the tensor for the next part of the model, or the metrics of the last part."""


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Chunk:
    """One consecutive part of the model on a stage; a pass runs it as a whole.

    Attributes:
        module: exactly the chunk's parameters. Their gradients are final after the chunk's last backward pass.
        forward: function of the previous part's output (None in the first part) and a micro-batch. It returns the
            input of the next part, or the losses in the last part.
        prepare: called before the chunk's first forward pass of a step, outside its graph: waits for pending weights
            and casts them. May be called several times per step. Needed only by :mod:`common.step.chunk_graphs`.
        begin_backward: called at the start of a captured backward pass, because any pass may have run before it.
    """

    module: nn.Module
    forward: Callable[[Tensor | None, Batch], Tensor | Losses]
    prepare: Callable[[], None] = nothing
    begin_backward: Callable[[], None] = nothing


@dataclass(frozen=True)
class Passed:
    """State that a forward pass keeps for the backward pass: its input, and the result's gradient edge or the loss."""

    source: Tensor | None
    result: GradientEdge | Tensor


class ChunkPasses(Protocol):
    """Runs the passes of one stage."""

    def begin(self, units: Sequence[Unit]) -> None:
        """Start an iteration that runs these passes in this order."""

    def forward(self, unit: Unit, source: Tensor | None, batch: Batch) -> Made:
        """Run the forward pass of a chunk.

        Args:
            unit: chunk and micro-batch number.
            source: output of the previous part of the model; None in the first part.

        Returns:
            The output, or the metrics in the last part of the model, in memory that is not overwritten later.
        """

    def backward(self, unit: Unit, gradient: Tensor | None, final: bool) -> Tensor | None:
        """Run the backward pass of a chunk.

        Args:
            gradient: gradient of the chunk's forward output; None in the last part.
            final: whether this is the chunk's last backward pass in the step. Its parameters are armed then.

        Returns:
            The gradient of ``source``, in memory that is not overwritten later; None in the first part.
        """


def forward_pass(
    number: int, chunk: Chunk, source: Tensor | None, batch: Batch, ends: bool, loss_scale: LossScale | None
) -> tuple[Passed, Made]:
    """Run the forward pass of a chunk.

    Args:
        number: index of the chunk, for messages.
        source: a leaf that requires gradients; None in the first part of the model.
        ends: whether the chunk is the last part of the model.

    Raises:
        ValueError: the last part returned no losses, or another part did.
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
    """Run the backward pass of a chunk. Accumulate parameter gradients and return the gradient of the chunk's input.

    Args:
        number: index of the chunk, for messages.
        passed: state of the forward pass; usable once.
        gradient: gradient of the forward output; None for a loss.

    Raises:
        ValueError: the chunk does not depend on its input.
    """
    result: Any = passed.result  # PyTorch's type stubs do not accept a list of this union
    torch.autograd.backward([result], [gradient])
    if passed.source is None:
        return None
    found, passed.source.grad = passed.source.grad, None
    if found is None:
        raise ValueError(f"chunk {number} does not depend on what the part of the model before it hands on")
    return found


class EagerPasses:
    """Runs every pass eagerly.

    Args:
        ends: for each chunk, whether it is the last part of the model.
    """

    def __init__(self, chunks: Sequence[Chunk], ends: Sequence[bool], loss_scale: LossScale | None) -> None:
        self._chunks, self._ends, self._loss_scale = tuple(chunks), tuple(ends), loss_scale
        self._passed: dict[tuple[int, int], Passed] = {}

    def begin(self, units: Sequence[Unit]) -> None:
        """Discard the state of earlier forward passes; see :class:`ChunkPasses`."""
        self._passed = {}

    def forward(self, unit: Unit, source: Tensor | None, batch: Batch) -> Made:
        """Run a forward pass; return its output, or the metrics in the last part; see :class:`ChunkPasses`."""
        if source is not None:
            source.requires_grad_()
        number = unit.chunk
        passed, made = forward_pass(
            number, self._chunks[number], source, batch, self._ends[number], self._loss_scale
        )  # fmt: skip
        self._passed[number, unit.micro_batch] = passed
        return made

    def backward(self, unit: Unit, gradient: Tensor | None, final: bool) -> Tensor | None:
        """Run a backward pass; return the gradient of its input, or None in the first part.

        See :class:`ChunkPasses`.
        """
        return backward_pass(unit.chunk, self._passed.pop((unit.chunk, unit.micro_batch)), gradient)
