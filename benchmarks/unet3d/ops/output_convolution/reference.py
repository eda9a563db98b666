"""The reference of :mod:`benchmarks.unet3d.ops.output_convolution`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

MOST_CHANNELS = 64
"""Input channels that the Triton kernels hold in one tile."""


def output_convolution_reference(x_NCDHW: Tensor, weight: Tensor, bias_K: Tensor) -> Tensor:
    """PyTorch's.

    Args:
        x_NCDHW: the input.
        weight: (K, C, 1, 1, 1).
        bias_K: the bias; both of the dtype of ``x_NCDHW``.

    Returns:
        Logits (N, K, D, H, W), same dtype.
    """
    return F.conv3d(x_NCDHW, weight, bias_K)
