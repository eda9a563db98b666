"""Parts of an iteration beside each other: on streams of their own, which a captured graph keeps as branches.

A part with a loss of its own can also run its backward pass right away, while the rest of the network is still in its
forward pass: :func:`early` differentiates it with respect to its inputs, cut off from what made them, and to its
parameters, and gives these gradients on when the backward pass of the whole gets there. So gradients of parameters
appear where the optimizer's hooks expect them, on the stream of the backward pass, and inputs get the sum over all
their users as usual. That holds if nothing of the part's own graph is left by then: PyTorch adds to a parameter on the
stream on which it first met it, for as long as a graph remembers. What is still wanted of the part is :func:`detached`.

Without a GPU the same work is done in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Branch:
    """A stream beside the current one.

    What the branch reads must stay referenced until :meth:`join`, since its memory belongs to the stream that it was
    made on; the caller sees to that. What the branch makes may be used after it, for as long as one likes: its memory
    is used again by a later :meth:`beside` alone, which first waits for all that the current stream has been given.

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Queue the work of the block on the branch; it waits for what the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for what the branch has been given so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(frozen=True)
class Early:
    """A part of the network whose backward pass has been queued already.

    Attributes:
        losses: 0-d, detached; their sum is what was differentiated.
    """

    losses: tuple[Tensor, ...]
    _scale: Tensor
    _sources: tuple[Tensor, ...]
    _gradients: tuple[Tensor | None, ...]

    def total(self) -> Tensor:
        """The sum of the losses, 0-d, whose backward pass hands on the gradients. Once, after :meth:`Branch.join`."""
        return _HandOn.apply(torch.stack(self.losses).sum(), self._scale, self._gradients, *self._sources)


def cut(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same values, from which a part of the network that is differentiated on its own begins."""
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]


def detached(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same values without the graph that made them."""
    return tuple(tensor.detach() for tensor in tensors)


def early(
    losses: Sequence[Tensor], scale: Tensor, inputs: Sequence[tuple[Tensor, Tensor]], parameters: Sequence[Tensor]
) -> Early:
    """Run the backward pass of a part of the network now.

    Args:
        losses: 0-d, of the part.
        scale: what the iteration multiplies the losses by before it differentiates them, 0-d: gradients would be too
            small for fp16 without it.
        inputs: what the part began from, as the rest of the network knows it, and as :func:`cut` made it.
        parameters: of the part, which no other part has.
    """
    asked = [(source, leaf) for source, leaf in inputs if leaf.requires_grad]
    asked += [(parameter, parameter) for parameter in parameters if parameter.requires_grad]
    total = torch.stack(tuple(losses)).sum()
    gradients = torch.autograd.grad(total * scale, [leaf for _, leaf in asked], allow_unused=True)
    return Early(tuple(loss.detach() for loss in losses), scale, tuple(source for source, _ in asked), gradients)


class _HandOn(torch.autograd.Function):
    """Gives on gradients that are there already, in the place of differentiating."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, scale: Tensor, gradients: tuple[Tensor | None, ...], *sources: Tensor
    ) -> Tensor:
        ctx.scale, ctx.gradients = scale, gradients
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        factor = outer[0] / ctx.scale  # 1, unless the total has a weight
        # Not in place: two of them may be the same tensor.
        handed_on = [None if gradient is None else gradient * factor for gradient in ctx.gradients]
        ctx.gradients = ()
        return None, None, None, *handed_on
