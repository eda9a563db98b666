"""Summed weights computed by PyTorch's operations; the reference for the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.triton_support import widen


def summed_taps(weight_OI33: Tensor) -> Tensor:
    """Return the weights of the transposed convolution, (I, O, 4, 4) in channels_last memory, in the dtype of the
    weight.

    Sums are rounded once and have a gradient.

    Args:
        weight_OI33: weight of the convolution of the upsampled picture.
    """
    taps = _summed(_summed(widen(weight_OI33), 2), 3).to(weight_OI33.dtype)
    return taps.transpose(0, 1).contiguous(memory_format=torch.channels_last)


def _summed(weight: Tensor, axis: int) -> Tensor:
    """Return the four taps for three weights along an axis."""
    first, middle, last = weight.unbind(axis)
    return torch.stack((last, middle + last, first + middle, first), axis)
