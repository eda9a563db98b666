"""FLOPs of convolutions, for the FLOPs utilization of a training run.

A multiply-add is 2 FLOPs. Training runs a layer up to three times: the forward pass, the weight gradient and the
input gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of a layer for one image.

    Attributes:
        forward: FLOPs of the forward pass.
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
