"""FLOPs of convolutions, for the share of a device's peak that a training run uses.

A multiply-add is 2 FLOPs. Training runs a layer up to three times: forward, and for the gradients of its weight and of
its input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of a layer for one picture.

    Attributes:
        name: of the layer.
        forward: of the forward pass.
        training: of the forward pass and of the gradients that the layer needs.
    """

    name: str
    forward: float
    training: float


def result_size(layer: nn.Conv2d, size: Size) -> Size:
    """Height and width of the result of a square convolution over ``size``."""
    height, width = ((side + 2 * int(layer.padding[0]) - layer.kernel_size[0]) // layer.stride[0] + 1 for side in size)
    return height, width


def convolution_flops(
    name: str, layer: nn.Conv2d, size: Size, input_gradient: bool = True, in_channels: int | None = None
) -> LayerFlops:
    """FLOPs of a convolution over one picture.

    Args:
        name: of the layer.
        layer: its weight's gradient counts if the weight is trained.
        size: height and width of its input.
        input_gradient: whether its input's gradient counts: a trained layer comes before it.
        in_channels: channels of its input that count; None for all.
    """
    channels = (in_channels or layer.in_channels) // layer.groups
    taps = channels * layer.kernel_size[0] * layer.kernel_size[1]
    forward = 2.0 * math.prod(result_size(layer, size)) * layer.out_channels * taps
    return LayerFlops(name, forward, forward * (1 + int(layer.weight.requires_grad) + int(input_gradient)))
