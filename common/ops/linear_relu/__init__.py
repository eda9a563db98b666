"""Linear layer with bias and ReLU in the product's epilogue, and a backward pass of its own.

The gradient in front of the ReLU and its sum for the bias are one pass. Of activations only input and result are kept.
Shapes: B samples, K inputs, N outputs.
"""

from __future__ import annotations

from common.ops.linear_relu.reference import linear_relu_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

LINEAR_RELU = Operation(
    "linear_relu",
    linear_relu_reference,
    {
        "fused": triton_kernels("common.ops.linear_relu.triton:linear_relu"),
    },
    kernel_names=(("gradient of ReLU", r"^relu_gradient_"),),
    cases="common.ops.linear_relu.cases",
)
"""Signature: ``linear_relu(x_BK, weight_NK, bias_N)``. ``fused`` has its products from cuBLASLt, the forward one with
an epilogue, and the pass in front of the ReLU from Triton."""
