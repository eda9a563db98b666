"""Convolution with cuDNN, with a fused epilogue if cuDNN supports it, otherwise with one in Triton.

PyTorch's ``cudnn_convolution_relu`` and ``cudnn_convolution_add_relu`` apply bias, residual and ReLU to the
accumulators of the convolution; the former passes its own output to cuDNN as a residual times 0. They do not support
groups, channels that are not multiples of 8, or an epilogue without ReLU. In these cases the epilogue is one pass over
the result (by PyTorch if it is only a bias).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.conv_bias_relu import triton
from common.ops.conv_bias_relu.reference import Passes, Shape, apply

_CHANNELS = 8
"""Divisor of the input and output channels of convolutions with a fused epilogue."""


def forward(
    x_NCHW: Tensor, weight: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, shape: Shape, relu: bool
) -> Tensor:
    """Return the result of one fused kernel of cuDNN if possible, otherwise of a convolution and a second pass."""
    x_NCHW = triton.channels_last(x_NCHW)
    channels_fit = weight.shape[0] % _CHANNELS == weight.shape[1] % _CHANNELS == 0
    if x_NCHW.is_cuda and relu and shape.groups == 1 and channels_fit:
        rest = ([shape.stride] * 2, [shape.padding] * 2, [1, 1], shape.groups)
        if residual_NCHW is None:
            return torch.cudnn_convolution_relu(x_NCHW, weight, bias_C, *rest)
        return torch.cudnn_convolution_add_relu(x_NCHW, weight, residual_NCHW, 1.0, bias_C, *rest)
    bias_only = residual_NCHW is None and not relu
    y_NCHW = F.conv2d(x_NCHW, weight, bias_C if bias_only else None, shape.stride, shape.padding, groups=shape.groups)
    return y_NCHW if bias_only else triton.epilogue_(y_NCHW, bias_C, residual_NCHW, relu)


PASSES = Passes(forward, triton.masked)


def conv_bias_relu(
    x_NCHW: Tensor,
    weight: Tensor,
    bias_C: Tensor,
    stride: int,
    padding: int,
    groups: int,
    relu: bool,
    residual_NCHW: Tensor | None = None,
) -> Tensor:
    """See :func:`common.ops.conv_bias_relu.reference.conv_bias_relu_reference`."""
    return apply(PASSES, x_NCHW, weight, bias_C, Shape(stride, padding, groups), relu, residual_NCHW)
