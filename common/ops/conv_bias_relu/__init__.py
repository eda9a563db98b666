"""Convolution with bias, a residual and ReLU in its epilogue, and a hand-written backward pass.

``relu(conv(x, weight) + bias + residual)``. Autograd would keep the result of every step. Here backward keeps only x,
the weight, and the final result, which is positive where the gradient passes ReLU. A frozen batch norm is a scale in
the weight and a bias that needs no gradient.
Shapes: N pictures, C channels (of the result, for the bias), H height, W width.
"""

from __future__ import annotations

import torch

from common.ops.conv_bias_relu.reference import conv_bias_relu_reference
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import HALVES, no_triton


def _unsupported(request: OperationRequest) -> str | None:
    if request.dtype not in HALVES:
        return f"activations are fp16 or bf16, not {request.dtype}"
    if request.device.type == "cuda" and not torch.backends.cudnn.is_available():
        return "PyTorch has no cuDNN"
    return no_triton(request.device)


CONV_BIAS_RELU = Operation(
    "conv_bias_relu",
    conv_bias_relu_reference,
    {
        "cudnn": Implementation("common.ops.conv_bias_relu.cudnn:conv_bias_relu", _unsupported),
    },
    kernel_names=(
        ("convolution's epilogue", r"^conv_epilogue_"),
        ("gradient of ReLU", r"^relu_gradient_"),
    ),
    cases="common.ops.conv_bias_relu.cases",
)
"""Signature: ``conv_bias_relu(x_NCHW, weight, bias_C, stride, padding, groups, relu, residual_NCHW=None)``.

A network uses one implementation for all of its convolutions. On a CPU with Triton's interpreter, ``cudnn`` is
PyTorch's convolution with our epilogue."""
