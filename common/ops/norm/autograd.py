"""Autograd of norms: sums over ranks, for statistics over several ranks, and results with two consumers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over ranks.

    The gradient is summed too, because the loss of every rank depends on the input of every rank.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, sum_in_place: Callable[[Tensor], object]) -> Tensor:
        ctx.sum_in_place = sum_in_place
        total = value.clone()
        sum_in_place(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.sum_in_place(total)
        return total, None


def second_reader(y: Tensor) -> Tensor:
    """Return a second tensor on the storage of ``y``, for the second consumer of a result.

    Autograd does not treat it as a view. So backward receives both gradients and can add them when it reads them.
    """
    alias = torch.empty(0, dtype=y.dtype, device=y.device)
    alias.set_(y)  # type: ignore[call-overload]
    return alias
