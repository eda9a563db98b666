"""Training batch normalisation fused with what follows it: ReLU, a residual, a second batch norm, max pooling.

Four operations, each with a PyTorch reference and Triton kernels:

``batch_norm``                ``BN(x)`` or ``relu(BN(x))``
``batch_norm_add_relu``       ``relu(BN(x) + residual)`` or ``relu(BN(x) + BN(projection))``, returned twice: the next
                              block uses one for its convolution and one for its residual, so that backward receives
                              the two gradients separately and adds them while it reads them
``batch_norm_relu_max_pool``  ``max_pool(relu(BN(x)), 3, stride 2, padding 1)``
``batch_norm_evaluate``       the first two with the running statistics

Statistics are per channel over N, H, W, and over the ranks of ``group`` where one is given (group batch norm): then
the result, running statistics and gradients equal batch norm over the concatenated batch, each rank holding the part of
the weight and bias gradients that sums to the whole (as for every other parameter).
Shapes: N images, C channels, H height, W width. Activations are fp16, bf16, fp32 (or fp64 in the reference);
weight, bias and statistics are fp32.
"""

from __future__ import annotations

import torch

from common.ops.batch_norm.reference import (
    batch_norm_add_relu_reference,
    batch_norm_evaluate_reference,
    batch_norm_reference,
    batch_norm_relu_max_pool_reference,
)
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import no_triton


def _triton_unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {request.device.type}"
    if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"activations are fp16, bf16 or fp32, not {request.dtype}"
    if request.sizes["channels"] % 8:
        return f"{request.sizes['channels']} channels are not a multiple of 8"
    return no_triton(request.device)


BATCH_NORM = Operation(
    "batch_norm",
    batch_norm_reference,
    {
        "triton": Implementation("common.ops.batch_norm.triton:batch_norm", _triton_unsupported),
    },
    kernel_names=(
        ("batch or instance norm", r"^(moments|normalise|gradient_sums|input_gradient)_kernel"),
        ("batch or instance norm", r"^(group_)?(statistics|coefficients)_kernel"),
        ("pooling", r"^pool_"),
    ),
    former={"cudnn": "convolution_moments=cudnn"},
)
BATCH_NORM_ADD_RELU = Operation(
    "batch_norm_add_relu",
    batch_norm_add_relu_reference,
    {
        "triton": Implementation("common.ops.batch_norm.triton:batch_norm_add_relu", _triton_unsupported),
    },
)
BATCH_NORM_RELU_MAX_POOL = Operation(
    "batch_norm_relu_max_pool",
    batch_norm_relu_max_pool_reference,
    {
        "triton": Implementation("common.ops.batch_norm.pool_triton:batch_norm_relu_max_pool", _triton_unsupported),
    },
)
BATCH_NORM_EVALUATE = Operation(
    "batch_norm_evaluate",
    batch_norm_evaluate_reference,
    {
        "triton": Implementation("common.ops.batch_norm.triton:batch_norm_evaluate", _triton_unsupported),
    },
)
