"""The plain version of :mod:`common.ops.conv_bias_relu`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def conv_bias_relu_torch(
    x_NCHW: Tensor,
    weight: Tensor,
    bias_C: Tensor,
    stride: int,
    padding: int,
    groups: int,
    relu: bool,
    residual_NCHW: Tensor | None = None,
) -> Tensor:
    """``relu(conv(x, weight) + bias + residual)``; ReLU and residual may be absent. Plain version.

    Args:
        x_NCHW: input.
        weight: (C out, C in / groups, kernel, kernel), dtype of the input.
        bias_C: (C out,), dtype of the input.
        stride, padding: of both height and width.
        groups: of channels that see each other.
        relu: whether ReLU ends it.
        residual_NCHW: of the result's shape, added before the ReLU.
    """
    y_NCHW = F.conv2d(x_NCHW, weight, bias_C, stride=stride, padding=padding, groups=groups)
    if residual_NCHW is not None:
        y_NCHW = y_NCHW + residual_NCHW
    return F.relu(y_NCHW) if relu else y_NCHW
