"""A weight's gradient out of operands in 16 bits or wider, added within the product that makes it.

Legend: T tokens, O output and I input features of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_product_(gradient_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    """``gradient += dy^T x`` within the product: sums are in fp32, and rounded once, to the gradient's dtype.

    On a GPU nothing is written but the gradient.

    Args:
        gradient_OI: of the operands' dtype, or fp32 of operands in 16 bits.
        dy_TO, x_TI: operands.
    """
    if gradient_OI.dtype == x_TI.dtype:
        gradient_OI.addmm_(dy_TO.t(), x_TI)
    elif gradient_OI.is_cuda:
        torch.addmm(gradient_OI, dy_TO.t(), x_TI, out_dtype=gradient_OI.dtype, out=gradient_OI)
    else:  # where PyTorch has no product of mixed dtypes
        gradient_OI.addmm_(dy_TO.t().to(gradient_OI.dtype), x_TI.to(gradient_OI.dtype))
