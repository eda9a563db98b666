"""The reference of :mod:`benchmarks.unet3d.ops.upsample`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def upsample_reference(x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, skip_NCDHW: Tensor) -> Tensor:
    """``cat(transposed convolution of x, skip)``.

    Args:
        x_NCDHW: (N, C_in, D, H, W).
        weight: (C_in, C, 2, 2, 2).
        bias_C: the bias. Its gradient and the weight's are those of the slab where the volume is split.
        skip_NCDHW: (N, C, 2D, 2H, 2W). All four have one dtype.

    Returns:
        (N, 2C, 2D, 2H, 2W), same dtype.

    Raises:
        ValueError: the skip connection is not twice as large as the input, or has other channels than the filters.
    """
    check_shapes(x_NCDHW, weight, skip_NCDHW)
    return torch.cat((F.conv_transpose3d(x_NCDHW, weight, bias_C, stride=2), skip_NCDHW), 1)


def check_shapes(x_NCDHW: Tensor, weight: Tensor, skip_NCDHW: Tensor) -> None:
    """Make sure that the channels can be joined.

    Raises:
        ValueError: they can't.
    """
    expected = (len(x_NCDHW), weight.shape[1], *(2 * size for size in x_NCDHW.shape[2:]))
    if tuple(skip_NCDHW.shape) != expected:
        raise ValueError(f"a skip of {tuple(skip_NCDHW.shape)} where the upsampled volume is {expected}")
