"""Linear layer with bias and ReLU in the epilogue of its product, with a hand-written backward pass.

One pass computes the gradient in front of the ReLU and the gradient of the bias. Of the activations only input and
result are kept. Shapes: B samples, K inputs, N outputs.
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
"""Signature: ``linear_relu(x_BK, weight_NK, bias_N)``. In ``fused``, cuBLASLt computes the products, forward with an
epilogue, and Triton the gradient in front of the ReLU."""
