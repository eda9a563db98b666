"""A small FLUX.1 network and its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.model import Flux

SMALL = FluxArchitecture(
    hidden=32, heads=2, feed_forward=96, double_blocks=2, single_blocks=3, rope_axes=(4, 8, 4), rope_theta=100.0,
    time_features=16, time_period=10000.0, time_scale=1000.0, latent_channels=3, latent_size=6, patch=2, text_length=5,
    text_width=12, caption_width=10, norm_epsilon=1e-6,
)  # fmt: skip
"""Sizes that differ from each other, so that no two can be exchanged."""


def small_flux(dtype: torch.dtype = torch.float64, zero_std: float = 0.1, **options: int) -> Flux:
    """Return the network with random weights; no parameter is constant except with ``zero_std=0``."""

    def generator_of(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(sum(name.encode()))

    model = Flux(SMALL, None, generator_of, dtype=dtype, zero_std=zero_std, **options)
    if zero_std:
        with torch.no_grad():  # biases and norms that start as constants would hide an exchange
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    noise = torch.randn(parameter.shape, generator=generator_of(name), dtype=torch.float64)
                    parameter.add_(0.1 * noise)
    return model


def inputs(samples: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return packed latents, text, captions and times."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    t_N = torch.rand(samples, generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    image, text = (SMALL.image_length, SMALL.packed), (SMALL.text_length, SMALL.text_width)
    return normal(samples, *image), normal(samples, *text), normal(samples, SMALL.caption_width), t_N
