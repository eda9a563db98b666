"""When the weights of FP8 products are cast, and what scales do: in training and in evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from common.ops.fp8_cast.reference import Scaling


class Scales(nn.Module):
    """Delayed scales of some tensors, in buffers that a checkpoint has and that warm-up puts back.

    Args:
        count: of tensors.
        device: of the scales.

    Attributes:
        scales: fp32 (count,), of the next use of each; 0 before the first.
        pending: int32 (count, 2), scratch of the casts, zeros between them.
    """

    scales: Tensor
    pending: Tensor

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("scales", torch.zeros(count, dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(count, 2, dtype=torch.int32, device=device), persistent=False)

    def scaling(self, role: int) -> Scaling:
        """State of one."""
        return Scaling(self.scales[role], self.pending[role])


class WeightCasts:
    """When weights are cast: in every forward pass, within ``once()`` in the first one only, within ``evaluating()``
    before any.

    Attributes:
        step: counts the times that weights may have changed; a product casts where it has another number.
        inference: what comes has no gradients, so that a cast of a weight leaves the scale as it is.
    """

    def __init__(self) -> None:
        self.step = 0
        self.inference = False
        self._once = False
        self._in_evaluations: list[Callable[[], None]] = []

    def before_evaluations(self, cast: Callable[[], None]) -> None:
        """Register a function that casts a product's weight before each evaluation."""
        self._in_evaluations.append(cast)

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Within it no weight changes. The host decides: a captured step casts in its first micro-batch."""
        self.step += 1
        self.inference = False  # also for who casts before the first pass begins
        self._once = True
        try:
            yield
        finally:
            self._once = False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it no weight changes and no gradients are wanted. All weights are cast at its beginning.

        Passes may be captured and replayed within it, and replayed within a later one.
        """
        with self.once():
            self.inference = True
            for cast in self._in_evaluations:
                cast()
            yield

    def begin(self, inference: bool) -> None:
        """A forward pass begins, without gradients if it is of an ``inference``."""
        self.inference = inference
        if not self._once:
            self.step += 1
