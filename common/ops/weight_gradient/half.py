"""Weight gradient from operands of 16 bits or more, added within the product."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product_(gradient_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    """Add ``dy^T x`` to the gradient within the product. Sums are in fp32 and rounded once, to the gradient's dtype.

    On a GPU only the gradient is written. Shapes: T tokens, O output and I input features of a weight.

    Args:
        gradient_OI: dtype of the operands, or fp32 for 16-bit operands.
    """
    if gradient_OI.dtype == x_TI.dtype:
        gradient_OI.addmm_(dy_TO.t(), x_TI)
    elif gradient_OI.is_cuda:
        torch.addmm(gradient_OI, dy_TO.t(), x_TI, out_dtype=gradient_OI.dtype, out=gradient_OI)
    else:  # on a CPU, PyTorch has no product of mixed dtypes
        gradient_OI.addmm_(dy_TO.t().to(gradient_OI.dtype), x_TI.to(gradient_OI.dtype))
