"""The convolution layer of networks with batch norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.ops import convolution as ops
from common.ops.operation import OperationRequest


class Conv2d(nn.Conv2d):
    """Square convolution without bias in front of a batch norm. At stride 1, the padding keeps height and width.

    Args:
        kernel: height and width of the kernel, an odd number.
        stride: stride in both directions.
        groups: groups of channels. With more than one, :meth:`with_moments` returns no moments.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
        )
        self._convolution = ops.CONVOLUTION.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """See :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(self.weight.device, dtype, {"channels": self.in_channels})
        self._convolution = ops.CONVOLUTION.select(requested, request)
        return self._convolution.name

    def with_moments(self, x_NCHW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the result and its moments, the two arguments of a batch norm layer.

        The moments are None in evaluation mode and where the implementation cannot compute them cheaply.
        """
        if not self.training or self.groups > 1:
            return self(x_NCHW), None
        result: tuple[Tensor, Tensor | None] = self._convolution.function(
            x_NCHW, self.weight, self.stride[0], self.kernel_size[0] // 2
        )
        return result

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, implementation={self._convolution.name}"
