"""Nearest upsampling by two and a 3x3 convolution, padded with zeros, as one operation.

An element of the result depends on 9 elements of the upsampled picture, but these are only 4 different elements of the
picture. Along an axis, with weights w0 w1 w2 and x the picture::

    y[2i]     = w0 x[i - 1] + (w1 + w2) x[i]          y[2i + 1] = (w0 + w1) x[i] + w2 x[i + 1]

So the same function, including borders, is four 2x2 convolutions with summed weights, one for each parity of row and
column, with 4/9 of the multiplications. They are one transposed convolution of stride 2 and padding 1, whose four taps
along an axis are ``(w2, w1 + w2, w0 + w1, w0)``: nothing has to be upsampled or interleaved. It runs the kernels of a
strided convolution's input gradient.

Shapes: N pictures, I input and O output channels, H W of the input. The result is (N, O, 2H, 2W).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Implementation, Operation
from common.ops.triton_support import triton_unsupported, widen


def upsample_convolution_reference(x_NIHW: Tensor, weight_OI33: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return ``conv(upsample(x)) + bias``, (N, O, 2H, 2W). The reference writes the upsampled picture.

    Args:
        weight_OI33, bias_O: parameters of the convolution, in the dtype of the input; None for no bias.
    """
    return F.conv2d(F.interpolate(x_NIHW, scale_factor=2.0, mode="nearest"), weight_OI33, bias_O, padding=1)


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


def _transposed(x_NIHW: Tensor, weight_OI33: Tensor, bias_O: Tensor | None) -> Tensor:
    # imported here because only this implementation needs Triton
    from common.ops.upsample_convolution.triton import summed_taps as summed_taps_triton

    return F.conv_transpose2d(x_NIHW, summed_taps_triton(weight_OI33), bias_O, stride=2, padding=1)


def _transposed_library(x_NIHW: Tensor, weight_OI33: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.conv_transpose2d(x_NIHW, summed_taps(weight_OI33), bias_O, stride=2, padding=1)


UPSAMPLE_CONVOLUTION = Operation(
    "upsample_convolution",
    upsample_convolution_reference,
    {
        "transposed": Implementation(_transposed, triton_unsupported),
        "transposed_library": Implementation(_transposed_library),
    },
    kernel_names=(("convolution, either way", r"^(sum|spread)_taps_"),),
    former={"transposed_torch": "transposed_library"},
    cases="common.ops.upsample_convolution.cases",
)
"""Signature: ``upsample_convolution(x_NIHW, weight_OI33, bias_O)``; ``bias_O`` may be None. ``transposed`` sums the
weights with a Triton kernel, ``transposed_library`` with PyTorch."""
