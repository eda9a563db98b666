"""Convolution with bias, a residual and ReLU in its epilogue, and a hand-written backward pass.

``relu(conv(x, weight) + bias + residual)``. Autograd would keep the result of every step. Here backward keeps only x,
the weight, and the final result, which is positive where the gradient passes ReLU. A frozen batch norm is a scale in
the weight and a bias that needs no gradient.
Shapes: N pictures, C channels (of the result, for the bias), H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import HALVES, no_triton


class Shape(NamedTuple):
    """Parameters of a square 2-D convolution without dilation; ``stride`` and ``padding`` are for height and width."""

    stride: int
    padding: int
    groups: int


class ConvolutionPasses(NamedTuple):
    """The functions of an implementation, without autograd.

    Attributes:
        forward: computes y from (x, weight, bias, residual or None, shape, relu).
        masked: computes the gradient before ReLU from (dy, y or None, whether the bias needs a gradient): dy where y is
            positive, or all of dy if y is None. Also returns the gradient's sum over N, H, W, or None.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, Shape, bool], Tensor]
    masked: Callable[[Tensor, Tensor | None, bool], tuple[Tensor, Tensor | None]]


class ConvBiasRelu(torch.autograd.Function):
    """Autograd function of an implementation. PyTorch computes the gradients of the convolution."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: ConvolutionPasses,
        x_NCHW: Tensor,
        weight: Tensor,
        bias_C: Tensor,
        residual_NCHW: Tensor | None,
        shape: Shape,
        relu: bool,
    ) -> Tensor:
        y_NCHW = passes.forward(x_NCHW, weight, bias_C, residual_NCHW, shape, relu)
        factors = (x_NCHW, weight) if any(ctx.needs_input_grad[1:3]) else (None, None)
        ctx.save_for_backward(*factors, y_NCHW if relu else None)
        ctx.passes, ctx.shape, ctx.bias_dtype = passes, shape, bias_C.dtype
        return y_NCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCHW, weight, y_NCHW = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias, needs_residual, _, _ = ctx.needs_input_grad
        dz_NCHW, d_bias_C = ctx.passes.masked(gradients[0], y_NCHW, needs_bias)
        dx_NCHW = d_weight = None
        if needs_x or needs_weight:
            (stride, padding, groups), needs = ctx.shape, [needs_x, needs_weight, False]
            dx_NCHW, d_weight, _ = torch.ops.aten.convolution_backward(
                dz_NCHW, x_NCHW, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups, needs
            )
        if d_bias_C is not None:
            d_bias_C = d_bias_C.to(ctx.bias_dtype)
        return None, dx_NCHW, d_weight, d_bias_C, dz_NCHW if needs_residual else None, None, None


def forward_reference(
    x_NCHW: Tensor, weight: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, shape: Shape, relu: bool
) -> Tensor:
    """Return ``conv(x, weight) + bias + residual``, (N, C out, H, W), with ReLU if ``relu``."""
    y_NCHW = F.conv2d(x_NCHW, weight, bias_C, shape.stride, shape.padding, 1, shape.groups)
    if residual_NCHW is not None:
        y_NCHW += residual_NCHW
    return y_NCHW.relu_() if relu else y_NCHW


def masked_reference(dy_NCHW: Tensor, y_NCHW: Tensor | None, needs_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return dy where y > 0, else 0 (all of dy if y is None), and its sums (C,), at least fp32, or None.

    See :class:`ConvolutionPasses`.
    """
    dz_NCHW = dy_NCHW if y_NCHW is None else torch.where(y_NCHW > 0, dy_NCHW, 0.0)
    if not needs_bias:
        return dz_NCHW, None
    sum_dtype = torch.float64 if dz_NCHW.dtype == torch.float64 else torch.float32
    return dz_NCHW, dz_NCHW.sum((0, 2, 3), dtype=sum_dtype)


PASSES = ConvolutionPasses(forward_reference, masked_reference)


def conv_bias_relu_reference(
    x_NCHW: Tensor,
    weight: Tensor,
    bias_C: Tensor,
    stride: int,
    padding: int,
    groups: int,
    relu: bool,
    residual_NCHW: Tensor | None = None,
) -> Tensor:
    """Return ``relu(conv(x, weight) + bias + residual)`` for a square 2-D convolution without dilation.

    All tensors have one dtype. The gradient of the bias is summed in fp32, or fp64 for fp64 inputs.

    Args:
        weight: (C out, C in / groups, kernel, kernel).
        stride, padding: values for both height and width.
        relu: whether to apply ReLU.
        residual_NCHW: tensor of the shape of the result to add before ReLU, or None.
    """
    return apply(PASSES, x_NCHW, weight, bias_C, Shape(stride, padding, groups), relu, residual_NCHW)


def apply(
    passes: ConvolutionPasses,
    x_NCHW: Tensor,
    weight: Tensor,
    bias_C: Tensor,
    shape: Shape,
    relu: bool,
    residual_NCHW: Tensor | None,
) -> Tensor:
    """Return ``conv(x, weight) + bias + residual``, with ReLU if ``relu``, with autograd around ``passes``."""
    y_NCHW: Tensor = ConvBiasRelu.apply(passes, x_NCHW, weight, bias_C, residual_NCHW, shape, relu)
    return y_NCHW


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
