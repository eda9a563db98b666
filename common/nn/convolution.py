"""Convolution layers, the dtype of their weights, and the FLOPs of a convolution.

A multiply-add is 2 FLOPs. Training runs a layer up to three times: the forward pass, the weight gradient and the
input gradient. Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.ops.convolution import CONVOLUTION
from common.ops.operation import OperationRequest
from common.ops.upsample_convolution import UPSAMPLE_CONVOLUTION


class Conv2d(nn.Conv2d):
    """Square convolution without bias in front of a batch norm. At stride 1, the padding keeps height and width.

    Args:
        kernel: height and width of the kernel, an odd number.
        groups: groups of channels. With more than one, :meth:`with_moments` returns no moments.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
        )
        self._convolution = CONVOLUTION.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation and return its name; see :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(self.weight.device, dtype, {"channels": self.in_channels})
        self._convolution = CONVOLUTION.select(requested, request)
        return self._convolution.name

    def with_moments(self, x_NCHW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the convolution (N, C out, H, W) and its moments, the two arguments of a batch norm layer.

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


Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of a layer for one image.

    Attributes:
        training: FLOPs of the forward pass and of the gradients that the layer needs.
    """

    name: str
    forward: float
    training: float


def result_size(layer: nn.Conv2d, size: Size) -> Size:
    """Return height and width of the result of a square convolution over an input of ``size``."""
    height, width = ((side + 2 * int(layer.padding[0]) - layer.kernel_size[0]) // layer.stride[0] + 1 for side in size)
    return height, width


def convolution_flops(
    name: str, layer: nn.Conv2d, size: Size, input_gradient: bool = True, in_channels: int | None = None
) -> LayerFlops:
    """Return the FLOPs of a convolution for one image.

    Args:
        layer: its weight gradient counts if the weight requires a gradient.
        size: height and width of the input.
        input_gradient: whether the input gradient counts, because there is a trained layer before this one.
        in_channels: number of input channels to count; None for all.
    """
    channels = (in_channels or layer.in_channels) // layer.groups
    taps = channels * layer.kernel_size[0] * layer.kernel_size[1]
    forward = 2.0 * math.prod(result_size(layer, size)) * layer.out_channels * taps
    return LayerFlops(name, forward, forward * (1 + int(layer.weight.requires_grad) + int(input_gradient)))


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert weights and biases of convolutions and linear layers to ``dtype``, the dtype of the activations.

    Other parameters, such as those of batch norms, stay fp32 unless ``dtype`` is fp64. This replaces the data of the
    parameters, so call it before an optimizer is created.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear) or dtype == torch.float64:
            module.to(dtype)


class UpsampleConvolution(nn.Conv2d):
    """Upsampling by two, then convolution. Parameters and their initialisation are those of the convolution.

    Args:
        channels: C of input and result.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1)
        self._upsample_convolution = UPSAMPLE_CONVOLUTION.choice("reference")

    def choose(self, requested: str, dtype: torch.dtype) -> str:
        """Choose the implementation and return its name; see :meth:`common.nn.choice.Choosing.choose`."""
        request = OperationRequest(self.weight.device, dtype, {"channels": self.in_channels})
        self._upsample_convolution = UPSAMPLE_CONVOLUTION.select(requested, request)
        return self._upsample_convolution.name

    def forward(self, x_NCHW: Tensor, biased: bool = True) -> Tensor:
        """Return ``conv(upsample(x)) + bias``, (N, C, 2H, 2W); without the bias if ``biased`` is False."""
        bias_C = self.bias if biased else None
        y_NCHW: Tensor = self._upsample_convolution.function(x_NCHW, self.weight, bias_C)
        return y_NCHW

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, implementation={self._upsample_convolution.name}"
