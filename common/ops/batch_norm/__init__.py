"""Training batch normalisation fused with what follows it: ReLU, a residual, a second batch norm, max pooling.

Four operations, each with a plain PyTorch version (the oracle) and a Triton one:

``batch_norm``                ``BN(x)`` or ``relu(BN(x))``
``batch_norm_add_relu``       ``relu(BN(x) + residual)`` or ``relu(BN(x) + BN(projection))``, returned twice: the next
                              block uses one for its convolution and one for its residual, so that backward receives
                              the two gradients separately and adds them while it reads them
``batch_norm_relu_max_pool``  ``max_pool(relu(BN(x)), 3, stride 2, padding 1)``
``batch_norm_evaluate``       the first two with the running statistics

Statistics are per channel over N, H, W, and over the ranks of ``group`` where one is given (group batch norm): then
the result, running statistics and gradients equal batch norm over the concatenated batch, each rank holding the part of
the weight and bias gradients that sums to the whole (as for every other parameter).
Shapes: N images, C channels, H height, W width. Activations are fp16, bf16, fp32 (or fp64 in the plain version);
weight, bias and statistics are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.batch_norm.plain import (
    batch_norm_add_relu_torch,
    batch_norm_evaluate_torch,
    batch_norm_relu_max_pool_torch,
    batch_norm_torch,
)
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import no_triton


def _triton_unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {request.device.type}"
    if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"activations are fp16, bf16 or fp32, not {request.dtype}"
    if request.sizes["channels"] % 8:
        return f"{request.sizes['channels']} channels are not a multiple of 8"
    return no_triton(request.device)


def _batch_norm_triton(*args: Any, **kwargs: Any) -> Tensor:
    from common.ops.batch_norm import triton as batch_norm_triton

    return batch_norm_triton.batch_norm(*args, **kwargs)


def _batch_norm_add_relu_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from common.ops.batch_norm import triton as batch_norm_triton

    return batch_norm_triton.batch_norm_add_relu(*args, **kwargs)


def _batch_norm_relu_max_pool_triton(*args: Any, **kwargs: Any) -> Tensor:
    from common.ops.batch_norm import pool_triton as batch_norm_pool_triton

    return batch_norm_pool_triton.batch_norm_relu_max_pool(*args, **kwargs)


def _batch_norm_evaluate_triton(*args: Any, **kwargs: Any) -> Tensor:
    from common.ops.batch_norm import triton as batch_norm_triton

    return batch_norm_triton.batch_norm_evaluate(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _batch_norm_triton, _triton_unsupported),
    "torch": Implementation("torch", batch_norm_torch, always),
}
ADD_RELU_IMPLEMENTATIONS = {
    "triton": Implementation("triton", _batch_norm_add_relu_triton, _triton_unsupported),
    "torch": Implementation("torch", batch_norm_add_relu_torch, always),
}
RELU_MAX_POOL_IMPLEMENTATIONS = {
    "triton": Implementation("triton", _batch_norm_relu_max_pool_triton, _triton_unsupported),
    "torch": Implementation("torch", batch_norm_relu_max_pool_torch, always),
}
EVALUATE_IMPLEMENTATIONS = {
    "triton": Implementation("triton", _batch_norm_evaluate_triton, _triton_unsupported),
    "torch": Implementation("torch", batch_norm_evaluate_torch, always),
}

KERNEL_NAMES = (
    ("batch or instance norm", r"^(moments|normalise|gradient_sums|input_gradient)_kernel"),
    ("batch or instance norm", r"^(group_)?(statistics|coefficients)_kernel"),
    ("pooling", r"^pool_"),
)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
