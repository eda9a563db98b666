"""Upsampling: a transposed convolution that doubles the volume, and concatenation with a skip connection.

The kernel is 2x2x2 with stride 2, so every output voxel depends on one input voxel. The convolution is a matrix
product with eight columns per filter, whose results go to the eight corners of the voxel. They are written directly
into the first half of the concatenated channels, so bias and concatenation need no separate passes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels


def upsample_reference(x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, skip_NCDHW: Tensor) -> Tensor:
    """Return ``cat(transposed convolution of x, skip)``, (N, 2C, 2D, 2H, 2W).

    Args:
        x_NCDHW: (N, C_in, D, H, W).
        weight: (C_in, C, 2, 2, 2).
        bias_C: (C,). If the volume is split, the gradients of weight and bias are those of the slab.
        skip_NCDHW: (N, C, 2D, 2H, 2W). All four have the same dtype.

    Raises:
        ValueError: the shape of the skip connection does not match.
    """
    check_shapes(x_NCDHW, weight, skip_NCDHW)
    return torch.cat((F.conv_transpose3d(x_NCDHW, weight, bias_C, stride=2), skip_NCDHW), 1)


def check_shapes(x_NCDHW: Tensor, weight: Tensor, skip_NCDHW: Tensor) -> None:
    """Check that the channels can be concatenated.

    Raises:
        ValueError: the shape of the skip connection does not match.
    """
    expected = (len(x_NCDHW), weight.shape[1], *(2 * size for size in x_NCDHW.shape[2:]))
    if tuple(skip_NCDHW.shape) != expected:
        raise ValueError(f"a skip of {tuple(skip_NCDHW.shape)} where the upsampled volume is {expected}")


UPSAMPLE = Operation(
    "upsample",
    upsample_reference,
    {
        "triton": triton_kernels("benchmarks.unet3d.ops.upsample.triton:upsample"),
    },
    kernel_names=(("convolution, either way", r"^upsample_"),),
    cases="benchmarks.unet3d.ops.upsample.cases",
)
"""Signature: ``upsample(x_NCDHW, weight, bias_C, skip_NCDHW)``."""
