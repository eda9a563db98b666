"""Convolution with bias, a residual and ReLU in its epilogue, and a backward pass of its own.

``relu(conv(x, weight) + bias + residual)``. Autograd would keep the result of every step; here only x, the weight and
the final result are kept, whose sign is the mask of the gradient. Where nothing needs a gradient nothing is kept. A
frozen batch norm is a scale in the weight and a bias that needs no gradient.
Shapes: N pictures, C channels (out, for the bias), H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.conv_bias_relu.plain import conv_bias_relu_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import no_triton


def _cudnn_unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"cuDNN needs a CUDA device, not {request.device.type}"
    return _epilogue_unsupported(request)


def _epilogue_unsupported(request: OperationRequest) -> str | None:
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"activations are fp16 or bf16, not {request.dtype}"
    if request.device.type == "cuda" and not torch.backends.cudnn.is_available():
        return "PyTorch has no cuDNN"
    return no_triton(request.device)


def _cudnn(*args: Any, **kwargs: Any) -> Tensor:
    # triton is imported only where it is used
    from common.ops.conv_bias_relu.cudnn import conv_bias_relu

    return conv_bias_relu(*args, **kwargs)


def _grouped(*args: Any, **kwargs: Any) -> Tensor:
    from common.ops.conv_bias_relu.grouped import conv_bias_relu

    return conv_bias_relu(*args, **kwargs)


def _epilogue(*args: Any, **kwargs: Any) -> Tensor:
    from common.ops.conv_bias_relu.cudnn import conv_then_epilogue

    return conv_then_epilogue(*args, **kwargs)


IMPLEMENTATIONS = {
    "cudnn": Implementation("cudnn", _cudnn, _cudnn_unsupported),
    "epilogue": Implementation("epilogue", _epilogue, _epilogue_unsupported),
    "triton": Implementation("triton", _grouped, _cudnn_unsupported),
    "torch": Implementation("torch", conv_bias_relu_torch, always),
}
"""Signature: ``conv_bias_relu(x_NCHW, weight, bias_C, stride, padding, groups, relu, residual_NCHW=None)``.

One choice serves all convolutions of a network. ``epilogue`` is ``cudnn`` with a pass of its own behind each.
``triton`` is ``cudnn`` but for 3x3 convolutions in groups of up to 32 channels, for which it has kernels of ours."""

KERNEL_NAMES = (
    ("convolution's epilogue", r"^conv_epilogue_"),
    ("gradient of ReLU", r"^relu_gradient_"),
    ("convolution, either way", r"^grouped_"),
)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
