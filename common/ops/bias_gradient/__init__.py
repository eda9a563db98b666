"""The gradient of a bias that a product or a convolution added: the sums over rows of its result's gradient.

``function(d_RC, dtype)`` gives (C,); it works without autograd, and its caller writes the backward pass. Shapes: R
rows, C columns. Tall and narrow gradients, such as 131,072 rows of 320, decide; the reference is PyTorch's own
reduction.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.bias_gradient.reference import row_sums_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

RowSums = Callable[[Tensor, torch.dtype], Tensor]


BIAS_GRADIENT = Operation(
    "bias_gradient",
    row_sums_reference,
    {
        "triton": triton_kernels("common.ops.bias_gradient.triton:row_sums"),
    },
    kernel_names=(("bias gradient", r"^row_sums_"),),
    cases="common.ops.bias_gradient.cases",
)
"""Functions: :data:`RowSums`."""
