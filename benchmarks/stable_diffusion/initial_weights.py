"""The weights that training starts from.

As PyTorch draws them by default: weights and biases of products and convolutions uniform up to 1 / sqrt(fan-in) to both
sides, norms 1 and 0. What ends a residual branch is zero, weight and bias, so that the network predicts 0 at first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.architecture import Architecture, Residual
from benchmarks.stable_diffusion.blocks import CaptionProjections, TimeProjections
from common.nn.group_norm import GroupNorm
from common.nn.layer_norm import LayerNorm
from common.nn.upsample_convolution import UpsampleConvolution

ZERO_AT_FIRST = (".out_layers.3", ".proj_out", "out.2")
"""Ends of the names of layers that start from zero."""

Drawn = nn.Linear | nn.Conv2d | UpsampleConvolution | TimeProjections | CaptionProjections


@torch.no_grad()
def draw_weights(model: nn.Module, architecture: Architecture, generator: torch.Generator, zero_std: float) -> None:
    """Fill all parameters.

    Args:
        model: the network.
        architecture: its shape.
        generator: source, on whose device is drawn, in fp32.
        zero_std: standard deviation of normal values in place of the zeros, to measure rates as they are later in
            training; 0 for the zeros.
    """
    for name, module in model.named_modules():
        if isinstance(module, GroupNorm | LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()
        elif isinstance(module, Drawn):
            starts_from_zero = name.endswith(ZERO_AT_FIRST)
            for parameter in (module.weight, getattr(module, "bias", None)):
                if parameter is None:
                    continue
                if starts_from_zero:
                    _normal(parameter, zero_std, generator)
                else:
                    _uniform(parameter, _fan_in(module.weight), generator)
        if isinstance(module, TimeProjections):
            parts = module.convolution_bias.split(module.rows.counts)
            for part, (_, layer) in zip(parts, architecture.named(Residual), strict=True):
                assert isinstance(layer, Residual)
                _uniform(part, 9 * sum(layer.inputs), generator)


def _fan_in(weight: Tensor) -> int:
    return weight[0].numel()


def _uniform(target: Tensor, fan_in: int, generator: torch.Generator) -> None:
    bound = 1.0 / math.sqrt(fan_in)
    drawn = torch.empty(target.shape, device=generator.device)
    target.copy_(drawn.uniform_(-bound, bound, generator=generator))


def _normal(target: Tensor, std: float, generator: torch.Generator) -> None:
    if std == 0.0:
        target.zero_()
        return
    target.copy_(torch.empty(target.shape, device=generator.device).normal_(0.0, std, generator=generator))
