"""Reference implementation of :mod:`common.ops.upsample_convolution`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def upsample_convolution_reference(x_NIHW: Tensor, weight_OI33: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return ``conv(upsample(x)) + bias``, (N, O, 2H, 2W). The reference writes the upsampled picture.

    Args:
        weight_OI33, bias_O: parameters of the convolution, in the dtype of the input; None for no bias.
    """
    return F.conv2d(F.interpolate(x_NIHW, scale_factor=2.0, mode="nearest"), weight_OI33, bias_O, padding=1)
