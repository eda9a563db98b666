"""Initial weights of the U-Net.

They follow PyTorch's defaults: linear layers and convolutions are uniform within +-1 / sqrt(fan-in), norms are 1 and
0. The last layer of each residual branch and of the network is zero (weight and bias), so the network first predicts
0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.unet_architecture import Residual, UNetArchitecture
from benchmarks.stable_diffusion.unet_blocks import CaptionProjections, TimeProjections
from common.nn.convolution import UpsampleConvolution
from common.nn.group_norm import GroupNorm, LayerNorm

ZERO_AT_FIRST = (".out_layers.3", ".proj_out", "out.2")
"""Name suffixes of the layers that start at zero."""

Drawn = nn.Linear | nn.Conv2d | UpsampleConvolution | TimeProjections | CaptionProjections


@torch.no_grad()
def draw_weights(model: nn.Module, architecture: UNetArchitecture, generator: torch.Generator, zero_std: float) -> None:
    """Initialise all parameters.

    Args:
        architecture: architecture of ``model``.
        generator: random generator; numbers are drawn on its device in fp32.
        zero_std: standard deviation of normal values that replace the zeros, so that measured speed is that of a
            later stage of training; 0 keeps the zeros.
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
