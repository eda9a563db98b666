"""The reference of :mod:`common.ops.convolution`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def convolution_reference(x_NCHW: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor | None]:
    """Compute a square 2-D convolution without bias, dilation or groups.

    Args:
        weight: (C out, C in, kernel, kernel), dtype of the input.
        stride, padding: values for both height and width.

    Returns:
        The result, and None instead of its moments.
    """
    return F.conv2d(x_NCHW, weight, stride=stride, padding=padding), None
