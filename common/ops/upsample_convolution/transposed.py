"""The upsampling convolution as a transposed convolution of summed weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def upsample_convolution_transposed(x_NIHW: Tensor, taps_IO44: Tensor, bias_O: Tensor | None) -> Tensor:
    """One transposed convolution; its gradients are a convolution of stride 2, and that one's weight gradient.

    Args:
        x_NIHW: input.
        taps_IO44: summed weights.
        bias_O: the bias; None for none. All three have one dtype.

    Returns:
        (N, O, 2H, 2W), same dtype.
    """
    return F.conv_transpose2d(x_NIHW, taps_IO44, bias_O, stride=2, padding=1)
