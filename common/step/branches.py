"""Run parts of an iteration concurrently, on side streams that a captured graph keeps as parallel branches.

A part with its own loss can run its backward pass at once, while the rest of the network is still in its forward pass.
:func:`early` computes the gradients of the part's inputs and parameters. The backward pass of the whole network later
passes them on, on its own stream, so that optimizer hooks and sums over several users of an input work as usual.

No graph of the part may be alive by then: while one is, PyTorch accumulates a parameter's gradient on the stream that
used the parameter first. Use :func:`detached` for results of the part that are still needed. Without a GPU, all work
runs in order.
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
    """A stream that runs concurrently with the current one.

    The caller must keep references to all inputs of the branch until :meth:`join`, because their memory belongs to
    another stream. Results of the branch can be used at any time after :meth:`join`: only a later :meth:`beside` reuses
    their memory, and it first waits for all work queued on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Queue the work of the block on the branch, after all work queued on the current stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for all work queued on the branch so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(frozen=True)
class Early:
    """A part of the network whose backward pass has already been queued.

    Attributes:
        losses: 0-d, detached. The gradients are those of their sum.
    """

    losses: tuple[Tensor, ...]
    _scale: Tensor
    _sources: tuple[Tensor, ...]
    _gradients: tuple[Tensor | None, ...]

    def total(self) -> Tensor:
        """Return the sum of the losses, 0-d. Call once, after :meth:`Branch.join`.

        Its backward pass passes the gradients that :func:`early` has computed on to the part's inputs and parameters.
        """
        return _HandOn.apply(torch.stack(self.losses).sum(), self._scale, self._gradients, *self._sources)


def cut(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return leaf tensors with the same values, as inputs of a part that is differentiated separately."""
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]


def detached(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the same values without their autograd graph."""
    return tuple(tensor.detach() for tensor in tensors)


def early(
    losses: Sequence[Tensor], scale: Tensor, inputs: Sequence[tuple[Tensor, Tensor]], parameters: Sequence[Tensor]
) -> Early:
    """Run the backward pass of a part of the network now.

    Args:
        losses: losses of the part, each 0-d.
        scale: 0-d factor by which the iteration multiplies losses before the backward pass, so that fp16 gradients do
            not underflow.
        inputs: pairs of an input of the part and its leaf from :func:`cut`.
        parameters: parameters of the part; no other part may use them.
    """
    asked = [(source, leaf) for source, leaf in inputs if leaf.requires_grad]
    asked += [(parameter, parameter) for parameter in parameters if parameter.requires_grad]
    total = torch.stack(tuple(losses)).sum()
    gradients = torch.autograd.grad(total * scale, [leaf for _, leaf in asked], allow_unused=True)
    return Early(tuple(loss.detach() for loss in losses), scale, tuple(source for source, _ in asked), gradients)


class _HandOn(torch.autograd.Function):
    """Passes on gradients that :func:`early` has computed, instead of differentiating."""

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
        # Not in place: two entries may be the same tensor.
        handed_on = [None if gradient is None else gradient * factor for gradient in ctx.gradients]
        ctx.gradients = ()
        return None, None, None, *handed_on
