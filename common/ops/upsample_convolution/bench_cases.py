"""The three layers of the U-Net that double a picture, in every implementation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import upsample_convolution
from common.ops.bench import diffusion as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import normal, size_of

_TAPS = 4  # products a place of the result needs of each channel


def case(
    function: Callable[..., Tensor], batch: int, dtype: torch.dtype, *, pictures: int, places: int, channels: int
) -> list[Pass]:
    """Forward, and all three gradients. FLOP are those that are needed, 4/9 of the upsampled picture's."""
    x, dy = (
        normal(dtype, pictures, channels, side, side).contiguous(memory_format=torch.channels_last)
        for side in (places, 2 * places)
    )
    weight = normal(dtype, channels, channels, 3, 3).contiguous(memory_format=torch.channels_last)
    bias = normal(dtype, channels)
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    flops = 2.0 * _TAPS * dy.numel() * channels
    moved = size_of(x) + size_of(weight) + size_of(dy)
    return both_ways(
        lambda: function(*leaves), leaves, [dy], moved=(moved, moved + size_of(x) + size_of(weight)),
        flops=(flops, 2 * flops),
    )  # fmt: skip


def entries() -> list[Entry]:
    """Every layer in every implementation, at both batches."""
    return [
        entry
        for pictures in size.BATCHES
        for places, channels in size.UPSAMPLED
        for entry in each(
            f"upsample_convolution {pictures}x{channels}x{places}",
            upsample_convolution.UPSAMPLE_CONVOLUTION,
            "transposed",
            {"channels": channels},
            functools.partial(case, pictures=pictures, places=places, channels=channels),
            calls=0,
        )
    ]


def sweeps() -> dict[str, Sweep]:
    """Filters, channels and warps of the kernels that sum weights and spread their gradient."""
    from common.ops.upsample_convolution import triton

    tiles = list(itertools.product((16, 32, 64), (16, 32, 64), (2, 4, 8)))
    places, channels = size.UPSAMPLED[0]
    function = upsample_convolution.UPSAMPLE_CONVOLUTION.function("transposed")
    build = functools.partial(case, function, 0, pictures=size.BATCHES[-1], places=places, channels=channels)
    return {
        f"upsample_convolution {key}": Sweep(triton.TILES, key, tiles, build, key == "spread") for key in triton.TILES
    }
