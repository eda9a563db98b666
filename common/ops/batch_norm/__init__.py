"""Batch normalisation fused with the operations after it: ReLU, a residual, a second batch norm, max pooling.

Four operations, each with a PyTorch reference and Triton kernels:

``batch_norm``                ``BN(x)`` or ``relu(BN(x))``
``batch_norm_add_relu``       ``relu(BN(x) + residual)`` or ``relu(BN(x) + BN(projection))``, returned twice: the next
                              block uses one result for its convolution and one for its residual, so that the backward
                              kernel receives two gradients and adds them itself
``batch_norm_relu_max_pool``  ``max_pool(relu(BN(x)), 3, stride 2, padding 1)``
``batch_norm_evaluate``       the first two in evaluation mode, with the running statistics

Statistics are per channel over N, H, W, and with ``group`` also over its ranks (group batch norm): results, running
statistics and gradients then equal batch norm over the concatenated batch. As for other parameters, the gradients of
weight and bias are those of the rank and have to be summed over ranks.
Shapes: N images, C channels, H height, W width. Activations are fp16, bf16, fp32 (or fp64 in the reference);
weight, bias and statistics are fp32.
"""

from __future__ import annotations

from common.ops.batch_norm.reference import (
    batch_norm_add_relu_reference,
    batch_norm_evaluate_reference,
    batch_norm_reference,
    batch_norm_relu_max_pool_reference,
)
from common.ops.operation import Implementation, Operation
from common.ops.triton_support import triton_kernels


def _kernels(source: str) -> Implementation:
    return triton_kernels(source, multiple_of={"channels": 8})


BATCH_NORM = Operation(
    "batch_norm",
    batch_norm_reference,
    {
        "triton": _kernels("common.ops.batch_norm.triton:batch_norm"),
    },
    kernel_names=(
        ("batch or instance norm", r"^(moments|normalise|gradient_sums|input_gradient)_kernel"),
        ("batch or instance norm", r"^(group_)?(statistics|coefficients)_kernel"),
        ("pooling", r"^pool_"),
    ),
    former={"cudnn": "convolution_moments=cudnn"},
    cases="common.ops.batch_norm.cases",
)
BATCH_NORM_ADD_RELU = Operation(
    "batch_norm_add_relu",
    batch_norm_add_relu_reference,
    {
        "triton": _kernels("common.ops.batch_norm.triton:batch_norm_add_relu"),
    },
    cases="common.ops.batch_norm.cases:ADD_RELU",
)
BATCH_NORM_RELU_MAX_POOL = Operation(
    "batch_norm_relu_max_pool",
    batch_norm_relu_max_pool_reference,
    {
        "triton": _kernels("common.ops.batch_norm.pool_triton:batch_norm_relu_max_pool"),
    },
    cases="common.ops.batch_norm.cases:RELU_MAX_POOL",
)
BATCH_NORM_EVALUATE = Operation(
    "batch_norm_evaluate",
    batch_norm_evaluate_reference,
    {
        "triton": _kernels("common.ops.batch_norm.triton:batch_norm_evaluate"),
    },
    cases="common.ops.batch_norm.cases:EVALUATE",
)
