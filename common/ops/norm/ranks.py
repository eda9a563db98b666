"""Sums over ranks with autograd, for statistics over several ranks."""

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
