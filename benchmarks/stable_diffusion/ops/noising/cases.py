"""Cases of the noising: the moments of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.stable_diffusion.diffusion import abar
from benchmarks.stable_diffusion.ops.noising import Noised, tables
from common.ops.cases import Case, Draw, Pass
from common.ops.sizes import diffusion

CHANNELS, SIDE = 4, 64
"""Channels of a latent, and pixels along its sides."""

LATENT_SCALE = 0.18215


def passes(
    function: Callable[..., Noised],
    draw: Draw,
    samples: int,
    channels: int,
    height: int,
    width: int,
    stored: torch.dtype = torch.float32,
    highest: float = -5.0,
) -> list[Pass]:
    """Make the forward pass: from moments to latents in the dtype of the activations and a target in fp32.

    Args:
        stored: dtype of the moments.
        highest: largest log-variance. The smallest log-variance, -40, is below the lower bound.
    """
    mean = draw.normal(samples, channels, height, width, scale=5.0, dtype=stored)
    log_variance = draw.uniform(samples, channels, height, width, low=-40.0, high=highest, dtype=stored)
    moments, ids = torch.cat([mean, log_variance], 1), draw.integers(0, 1 << 32, samples)
    seed = draw.seed()
    table = tables(abar(), LATENT_SCALE, torch.float64 if draw.wide else draw.dtype, draw.device)

    def forward() -> tuple[Any, ...]:
        found = function(moments, seed, ids, table)
        return found, *(x.is_contiguous(memory_format=torch.channels_last) for x in found[:2])

    elements = float(mean.numel())
    return [Pass("forward", forward, elements * (2 * stored.itemsize + draw.dtype.itemsize + 4))]


CASES = (
    Case(
        "Stable Diffusion",
        passes,
        {"samples": diffusion.PICTURES, "channels": CHANNELS, "height": SIDE, "width": SIDE},
        tests=[
            {"samples": 3, "height": 16, "width": 17},
            {"samples": 2, "channels": 3, "height": 16, "width": 16, "stored": torch.bfloat16},
            {"samples": 2, "height": 8, "width": 4, "highest": 22.0},  # beyond the upper bound
        ],
        gpu={"stored": torch.bfloat16},
        dtypes=diffusion.DTYPES,
    ),
)
