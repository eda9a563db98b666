"""Reference implementation of :mod:`benchmarks.unet3d.ops.output_convolution`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

MOST_CHANNELS = 64
"""Largest number of input channels that the Triton kernels support."""


def output_convolution_reference(x_NCDHW: Tensor, weight: Tensor, bias_K: Tensor) -> Tensor:
    """Return logits (N, K, D, H, W), computed by PyTorch.

    Args:
        weight: (K, C, 1, 1, 1).
        bias_K: (K,); all three have the same dtype.
    """
    return F.conv3d(x_NCDHW, weight, bias_K)
