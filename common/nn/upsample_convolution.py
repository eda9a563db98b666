"""Nearest upsampling by two and a 3x3 convolution as one layer, around :mod:`common.ops.upsample_convolution`.

Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.ops import upsample_convolution as ops
from common.ops.operation import OperationRequest


class UpsampleConvolution(nn.Conv2d):
    """Upsampling by two, then convolution. Parameters and their initialisation are those of the convolution.

    Args:
        channels: C of input and result.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1)
        self._upsample_convolution = ops.UPSAMPLE_CONVOLUTION.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """See :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(self.weight.device, dtype, {"channels": self.in_channels})
        self._upsample_convolution = ops.UPSAMPLE_CONVOLUTION.select(requested, request)
        return self._upsample_convolution.name

    def forward(self, x_NCHW: Tensor, biased: bool = True) -> Tensor:
        """Return ``conv(upsample(x)) + bias``, (N, C, 2H, 2W); without the bias if ``biased`` is False."""
        bias_C = self.bias if biased else None
        y_NCHW: Tensor = self._upsample_convolution.function(x_NCHW, self.weight, bias_C)
        return y_NCHW

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, implementation={self._upsample_convolution.name}"
