"""The reference of :mod:`common.ops.convolution`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def convolution_reference(x_NCHW: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor | None]:
    """Square 2-D convolution without bias, dilation or groups. Reference implementation.

    Args:
        x_NCHW: input.
        weight: (C out, C in, kernel, kernel), dtype of the input.
        stride, padding: of both height and width.

    Returns:
        The result, and its moments if there are any.
    """
    return F.conv2d(x_NCHW, weight, stride=stride, padding=padding), None
