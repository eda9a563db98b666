"""Scales of FP8 products, and when their weights are cast, in training and in evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from common.ops.fp8_cast.reference import Scaling


class Scales(nn.Module):
    """Delayed scales of several tensors. They are saved in checkpoints and restored after warm-up.

    Args:
        count: number of tensors.

    Attributes:
        scales: fp32 (count,), scale of the next use of each tensor; 0 before the first use.
        pending: int32 (count, 2), scratch of the casts, zeros between casts.
    """

    scales: Tensor
    pending: Tensor

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("scales", torch.zeros(count, dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(count, 2, dtype=torch.int32, device=device), persistent=False)

    def scaling(self, role: int) -> Scaling:
        """Return the state of the scale with index ``role``."""
        return Scaling(self.scales[role], self.pending[role])


class WeightCasts:
    """Schedule of the weight casts of FP8 products.

    By default, products cast in every forward pass, within ``once()`` only in the first one, and for ``evaluating()``
    before any forward pass.

    Attributes:
        step: incremented whenever weights may have changed. A product casts its weight if it last did so at another
            step.
        inference: whether the passes need no gradients, so that casts do not update the scales of weights.
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
        """Within this context, no weight changes. The host decides: a captured step casts in its first micro-batch.

        After the context, even if it failed, each pass casts again.
        """
        self.step += 1
        self.inference = False  # for casts before the first pass begins
        self._once = True
        try:
            yield
        finally:
            self._once = False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this context, no weight changes and no gradients are needed. Entering it casts all weights.

        CUDA graphs of passes may be captured and replayed within it, and replayed within a later such context.
        """
        with self.once():
            self.inference = True
            for cast in self._in_evaluations:
                cast()
            yield

    def begin(self, inference: bool) -> None:
        """Begin a forward pass. ``inference``: whether it needs no gradients."""
        self.inference = inference
        if not self._once:
            self.step += 1
