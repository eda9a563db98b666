"""Linear layer with bias and ReLU in the product's epilogue, and a backward pass of its own.

The gradient in front of the ReLU and its sum for the bias are one pass. Of activations only input and result are kept.
Shapes: B samples, K inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.implementation import Implementation, always
from common.ops.linear_relu.plain import linear_relu_torch
from common.ops.triton_support import triton_unsupported


def _fused(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    # triton is imported only where it is used
    from common.ops.linear_relu.triton import linear_relu

    return linear_relu(x_BK, weight_NK, bias_N)


IMPLEMENTATIONS = {
    "fused": Implementation("fused", _fused, triton_unsupported),
    "torch": Implementation("torch", linear_relu_torch, always),
}
"""Signature: ``linear_relu(x_BK, weight_NK, bias_N)``. ``fused`` has its products from cuBLASLt, the forward one with
an epilogue, and the pass in front of the ReLU from Triton."""

KERNEL_NAMES = (("gradient of ReLU", r"^relu_gradient_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
