"""Reference implementation of :mod:`common.ops.weight_gradient`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Room = Callable[[Sequence[int], torch.dtype], Tensor]
"""``room(shape, dtype)`` returns uninitialised memory that the operation may use until it returns."""


@torch.no_grad()
def accumulate_reference(
    dy_OT: Tensor, x_IT: Tensor, dy_inverse: Tensor, x_inverse: Tensor, gradient_OI: Tensor, room: Room
) -> None:
    """Add ``dy^T x`` to the gradient. The reference writes the product in the gradient's dtype, then adds it.

    Args:
        dy_OT, x_IT: FP8, contiguous.
        dy_inverse, x_inverse: inverse scales, 0-d fp32.
        gradient_OI: fp16, bf16 or fp32, contiguous.
        room: provides memory for the product.
    """
    product_OI = room(gradient_OI.shape, gradient_OI.dtype)
    torch._scaled_mm(
        dy_OT, x_IT.t(), dy_inverse, x_inverse, out_dtype=gradient_OI.dtype, use_fast_accum=True, out=product_OI
    )
    gradient_OI.add_(product_OI)
