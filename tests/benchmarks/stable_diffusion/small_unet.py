"""A small U-Net with every kind of block, and inputs for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture

SMALL = UNetArchitecture(
    latent_channels=4,
    latent_size=8,
    model_channels=8,
    channel_multipliers=(1, 2),
    residual_blocks=1,
    attention_levels=(0,),
    head_channels=4,
    context_width=6,
    context_length=5,
    norm_groups=4,
    norm_epsilon=1e-5,
    transformer_norm_groups=8,
    transformer_norm_epsilon=1e-6,
)
"""Widths differ between levels, groups between norms; pairs are of equal and of different widths, and of 24 channels,
whose groups of 6 straddle the border."""


def small_unet(
    dtype: torch.dtype = torch.float64,
    zero_std: float = 0.1,
    seed: int = 0,
    implementations: Mapping[str, str] | None = None,
) -> UNet:
    """With nothing zero, norms neither."""
    generator = torch.Generator().manual_seed(seed)
    model = UNet(SMALL, implementations, generator, dtype=dtype, zero_std=zero_std)
    if zero_std:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or ".0.weight" in name or ".0.bias" in name:
                    noise = torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
                    parameter.add_(noise.to(parameter))
    return model


def inputs(
    count: int = 2, dtype: torch.dtype = torch.float64, architecture: UNetArchitecture = SMALL
) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, time steps and captions."""
    generator, size = torch.Generator().manual_seed(7), architecture.latent_size
    x_NCHW = torch.randn((count, architecture.latent_channels, size, size), generator=generator)
    t_N = torch.randint(1000, (count,), generator=generator)
    context_NTK = torch.randn((count, architecture.context_length, architecture.context_width), generator=generator)
    return x_NCHW.to(dtype), t_N, context_NTK.to(dtype)
