"""The network's last layer: a 1x1x1 convolution with bias from a few channels to a class or three.

A voxel has fewer outputs than a tensor core's smallest tile has columns, for which cuDNN has nothing but its general
kernels. The layer is bound by memory: its input is read once in forward, read and its gradient written in backward.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported

MOST_CHANNELS = 64
"""Input channels that the Triton kernels hold in one tile."""


def output_convolution_torch(x_NCDHW: Tensor, weight: Tensor, bias_K: Tensor) -> Tensor:
    """PyTorch's.

    Args:
        x_NCDHW: the input.
        weight: (K, C, 1, 1, 1).
        bias_K: the bias; both of the dtype of ``x_NCDHW``.

    Returns:
        Logits (N, K, D, H, W), same dtype.
    """
    return F.conv3d(x_NCDHW, weight, bias_K)


def _triton_unsupported(request: OperationRequest) -> str | None:
    if request.channels > MOST_CHANNELS:
        return f"the kernels hold up to {MOST_CHANNELS} channels, not {request.channels}"
    return triton_unsupported(request)


def _output_convolution_triton(*args: Any) -> Tensor:
    # triton is imported only where it is used
    from benchmarks.unet3d.ops.output_convolution_triton import output_convolution

    return output_convolution(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _output_convolution_triton, _triton_unsupported),
    "torch": Implementation("torch", output_convolution_torch, always),
}
"""Signature: ``output_convolution(x_NCDHW, weight, bias_K)``; a request's channels are C."""
