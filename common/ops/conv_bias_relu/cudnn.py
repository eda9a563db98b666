"""The convolution through cuDNN, its epilogue fused into it where cuDNN can, and Triton kernels for what it cannot.

PyTorch's ``cudnn_convolution_relu`` and ``cudnn_convolution_add_relu`` run bias, residual and ReLU on the accumulators
of the convolution; the former hands cuDNN its own result as a residual times 0. They have no kernels for groups, for
channels that aren't multiples of 8, or without a ReLU: there the epilogue is one pass over the result (PyTorch's own,
where it is a bias only).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.conv_bias_relu import triton
from common.ops.conv_bias_relu.reference import Passes, Shape, apply

_CHANNELS = 8
"""Channels in and out are multiples of it where the tensor cores compute the epilogue too."""


def forward(
    x_NCHW: Tensor, weight: Tensor, bias_C: Tensor, residual_NCHW: Tensor | None, shape: Shape, relu: bool
) -> Tensor:
    """One kernel where cuDNN has it, otherwise the convolution and then one pass over its result."""
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
