"""Summed weights, in PyTorch's own operations: the reference of what the Triton kernels do in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.triton_support import widen


def summed_taps(weight_OI33: Tensor) -> Tensor:
    """Weights of the transposed convolution, with a gradient.

    Args:
        weight_OI33: of the convolution behind the upsampling.

    Returns:
        (I, O, 4, 4) in channels_last memory, of the same dtype; sums are rounded once.
    """
    taps = _summed(_summed(widen(weight_OI33), 2), 3).to(weight_OI33.dtype)
    return taps.transpose(0, 1).contiguous(memory_format=torch.channels_last)


def _summed(weight: Tensor, axis: int) -> Tensor:
    """Four taps of three along an axis."""
    first, middle, last = weight.unbind(axis)
    return torch.stack((last, middle + last, first + middle, first), axis)
