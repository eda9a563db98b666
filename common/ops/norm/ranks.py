"""Statistics over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SumOverRanks(torch.autograd.Function):
    """Sum over ranks; so is the gradient, since every rank's loss depends on every rank's input."""

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
