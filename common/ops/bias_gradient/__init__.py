"""The gradient of a bias that a product or a convolution added: the sums over rows of its result's gradient.

``function(d_RC, dtype)`` gives (C,); it works without autograd, and its caller writes the backward pass. Shapes: R
rows, C columns. Tall and narrow gradients, such as 131,072 rows of 320, decide; PyTorch's own reduction is the plain
version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.bias_gradient.plain import row_sums_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported

RowSums = Callable[[Tensor, torch.dtype], Tensor]


def _row_sums_triton(d_RC: Tensor, dtype: torch.dtype) -> Tensor:
    from common.ops.bias_gradient.triton import row_sums  # triton is imported only where it is used

    return row_sums(d_RC, dtype)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _row_sums_triton, triton_unsupported),
    "torch": Implementation("torch", row_sums_torch, always),
}
"""Functions: :data:`RowSums`."""

KERNEL_NAMES = (("bias gradient", r"^row_sums_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
