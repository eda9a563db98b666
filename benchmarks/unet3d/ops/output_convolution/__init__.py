"""The last layer of the network: a 1x1x1 convolution with bias from a few channels to a few classes.

A voxel has fewer outputs than the smallest tile of a tensor core has columns, and cuDNN has only general kernels for
this. The layer is memory-bound: forward reads its input once, backward reads it once and writes its gradient.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

MOST_CHANNELS = 64
"""Largest number of input channels that the Triton kernels support."""


def output_convolution_reference(x_NCDHW: Tensor, weight: Tensor, bias_K: Tensor) -> Tensor:
    """Return logits (N, K, D, H, W), computed by PyTorch.

    Args:
        weight: (K, C, 1, 1, 1).
        bias_K: (K,); all three have the same dtype.
    """
    return F.conv3d(x_NCDHW, weight, bias_K)


OUTPUT_CONVOLUTION = Operation(
    "output_convolution",
    output_convolution_reference,
    {
        "triton": triton_kernels(
            "benchmarks.unet3d.ops.output_convolution.triton:output_convolution", most={"channels": MOST_CHANNELS}
        ),
    },
    kernel_names=(("convolution, either way", r"^output_convolution_"),),
    cases="benchmarks.unet3d.ops.output_convolution.cases",
)
"""Signature: ``output_convolution(x_NCDHW, weight, bias_K)``; a request's size is ``channels``."""
