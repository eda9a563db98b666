"""Gradient of a bias: the sums over the rows of the gradient of a product or convolution.

Works without autograd; the caller writes the backward pass. The kernel is for tall gradients, such as 131,072 rows of
320 columns. Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def row_sums_reference(d_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the rows as (C,) in ``dtype``. They are taken in fp32, or fp64 for fp64 inputs."""
    return d_RC.sum(0, dtype=widen(d_RC[:0]).dtype).to(dtype)


RowSums = Callable[[Tensor, torch.dtype], Tensor]
"""Signature of :func:`row_sums_reference`."""

BIAS_GRADIENT = Operation(
    "bias_gradient",
    row_sums_reference,
    {"triton": triton_kernels("common.ops.bias_gradient.triton:row_sums")},
    kernel_names=(("bias gradient", r"^row_sums_"),),
    cases="common.ops.bias_gradient.cases",
)
