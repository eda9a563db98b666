"""Cases of the three layers of a latent U-Net that double height and width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of, with_gradients
from common.ops.sizes import diffusion

_TAPS = 4
"""Multiplications per element of the result and input channel. A convolution of the upsampled picture has 9."""


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    pictures: int,
    height: int,
    width: int,
    channels: int,
    filters: int,
    biased: bool = True,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the forward and backward passes; ``channels_last`` is the memory format of the weight."""

    def image(*shape: int, scale: float = 1.0) -> Tensor:
        """Return random values (N, C, H, W) in channels_last; ``shape`` is (N, H, W, C)."""
        return draw.normal(*shape, scale=scale).permute(0, 3, 1, 2)

    x, dy = image(pictures, height, width, channels), image(pictures, 2 * height, 2 * width, filters)
    weight = image(filters, 3, 3, channels, scale=(9 * channels) ** -0.5)
    if not channels_last:
        weight = weight.contiguous()
    bias = draw.normal(filters) if biased else None
    leaves = [each.requires_grad_() for each in (x, weight, bias) if each is not None]

    def forward() -> tuple[Any, ...]:
        y = function(x, weight, bias)
        return y, y.is_contiguous(memory_format=torch.channels_last)

    backward = with_gradients(leaves, [dy], lambda: function(x, weight, bias))
    flops = 2.0 * _TAPS * dy.numel() * channels
    moved = size_of(x, weight, dy)
    return [
        Pass("forward", forward, moved, flops),
        Pass("backward", backward, moved + size_of(x, weight), 2 * flops, after="forward"),
    ]


TESTS = (
    {"pictures": 1, "height": 2, "width": 3, "channels": 16, "filters": 32},
    {"pictures": 2, "height": 3, "width": 2, "channels": 37, "filters": 70, "channels_last": False},
    {"pictures": 1, "height": 1, "width": 1, "channels": 33, "filters": 2, "biased": False},
)

CASES = tuple(
    Case(
        f"Stable Diffusion, {channels} at {side}",
        passes,
        {
            "pictures": diffusion.PICTURES,
            "height": side,
            "width": side,
            "channels": channels,
            "filters": channels,
        },
        tests=TESTS if side == diffusion.UPSAMPLED[0][0] else (),
        gpu={"pictures": 2},
        dtypes=diffusion.DTYPES,
        tf32=True,
    )
    for side, channels in diffusion.UPSAMPLED
)
