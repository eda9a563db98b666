"""Names of precisions and their dtypes, and the loss scale that fp16 needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Dtype of weights, activations and gradients. Masters, statistics and losses are fp32, but fp64 with fp64 weights."""

GradientPrecision = Literal["same", "fp32"]
"""Precision in which gradients of weights are added up: that of the weights, or at least fp32."""


def gradient_dtype(weights: torch.dtype, precision: GradientPrecision) -> torch.dtype:
    """Return the dtype in which gradients of weights are added up."""
    return torch.promote_types(weights, torch.float32) if precision == "fp32" else weights


class LossScale:
    """Factor on the loss that keeps small fp16 gradients from becoming 0. It adapts on the device.

    The loss is multiplied with :attr:`applied` before the backward pass, and the update divides by it. If a gradient
    is not finite, nothing is written, and the scale falls if this is at least overflow number ``hysteresis`` in a row
    (as in apex's ``update_scale_hysteresis``). After ``growth_interval`` updates in a row without overflow the scale
    grows. Other dtypes do not need a scale.

    Args:
        growth_interval: updates without overflow after which the scale grows.
        initial: first value of the scale.
        growth, backoff: factors; use powers of two, so that scaling is exact. With 1 and 1 the scale is constant.
        hysteresis: number of overflows in a row from which on each one lowers the scale.
        predivide: additional divisor of the loss, so that a sum of fp16 gradients over many ranks stays in range.

    Attributes:
        value: the scale before ``predivide``, 0-d fp32. It adapts, and logs and checkpoints contain it.
        good_steps: updates without overflow since the scale last changed, 0-d int64. After overflows that did not
            change it, minus their number.

    Raises:
        ValueError: a factor or the interval is out of its range.
    """

    def __init__(
        self,
        device: torch.device | str,
        initial: float = 1024.0,
        growth_interval: int = 2000,
        growth: float = 2.0,
        backoff: float = 0.5,
        hysteresis: int = 1,
        predivide: float = 1.0,
    ) -> None:
        if not (initial > 0 and growth_interval >= 1 and growth >= 1 and 0 < backoff <= 1 and hysteresis >= 1):
            raise ValueError(
                f"loss scale: initial={initial} > 0, growth_interval={growth_interval} >= 1, growth={growth} >= 1, "
                f"0 < backoff={backoff} <= 1 and hysteresis={hysteresis} >= 1 must hold"
            )
        if not 0 < predivide < math.inf:
            raise ValueError(f"loss scale: predivide={predivide}: it must be positive and finite")
        self._predivide = predivide
        self._patience = hysteresis - 1
        self._interval, self._growth, self._backoff = growth_interval, growth, backoff
        self.value = torch.full((), initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def applied(self) -> Tensor:
        """Factor on the loss, by which the update divides: :attr:`value` / ``predivide``, 0-d fp32."""
        return self.value if self._predivide == 1.0 else self.value / self._predivide

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times :attr:`applied`."""
        return loss * self.applied

    @torch.no_grad()
    def update(self, overflow: Tensor, skip: Tensor) -> None:
        """Adapt the scale after an update.

        Args:
            overflow: 0-d bool, a gradient was not finite.
            skip: 0-d bool, the iteration must change nothing, including the scale.
        """
        good = self.good_steps.clamp(min=0) + 1
        grows = good >= self._interval
        bad = self.good_steps.clamp(max=0)
        falls = overflow & (bad <= -self._patience)
        bad = (bad - 1).clamp(min=-self._patience)
        grown = self.value * self._growth
        grown = torch.where(torch.isfinite(grown), grown, self.value)
        after = torch.where(falls, self.value * self._backoff, torch.where(grows & ~overflow, grown, self.value))
        good = torch.where(overflow, bad, torch.where(grows, torch.zeros_like(good), good))
        self.value.copy_(torch.where(skip, self.value, after))
        self.good_steps.copy_(torch.where(skip, self.good_steps, good))

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """Return the persistent device tensors."""
        return [("loss_scale", self.value), ("loss_scale_good_steps", self.good_steps)]
