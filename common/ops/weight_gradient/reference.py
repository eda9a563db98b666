"""The reference of :mod:`common.ops.weight_gradient`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Room = Callable[[Sequence[int], torch.dtype], Tensor]
"""``room(shape, dtype)``: memory that is this operation's until it returns, whose content is anything."""


@torch.no_grad()
def accumulate_reference(
    dy_OT: Tensor, x_IT: Tensor, dy_inverse: Tensor, x_inverse: Tensor, gradient_OI: Tensor, room: Room
) -> None:
    """Reference: the product is written in 16 bits, fp32 where the gradient is, and added.

    Args:
        dy_OT: FP8, contiguous.
        x_IT: FP8, contiguous.
        dy_inverse, x_inverse: 0-d fp32, of their scales.
        gradient_OI: fp16, bf16 or fp32, contiguous; the product is added to it.
        room: for the product.
    """
    product_OI = room(gradient_OI.shape, gradient_OI.dtype)
    torch._scaled_mm(
        dy_OT, x_IT.t(), dy_inverse, x_inverse, out_dtype=gradient_OI.dtype, use_fast_accum=True, out=product_OI
    )
    gradient_OI.add_(product_OI)
