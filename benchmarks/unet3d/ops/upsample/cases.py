"""Cases of the upsampling: the five decoder blocks of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.unet3d.ops.sizes import FACTS, SAMPLES
from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.local_convolution.cases import volumes


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    channels: int,
    filters: int,
    volume: tuple[int, int, int],
    channels_last: bool = True,
) -> list[Pass]:
    """Return the passes of transposed convolution and concatenation. Backward computes all four gradients.

    Args:
        channels: channels of the input.
        filters: channels of the skip connection.
        volume: (D, H, W) of the input; the skip connection has twice the size.
        channels_last: memory format of all tensors except the bias.
    """
    fine = [2 * size for size in volume]
    x = volumes(draw, samples, channels, volume, channels_last=channels_last)
    skip = volumes(draw, samples, filters, fine, channels_last=channels_last)
    weight = volumes(draw, channels, filters, (2, 2, 2), channels_last=channels_last)
    bias = draw.normal(filters)
    d_joined = volumes(draw, samples, 2 * filters, fine, channels_last=channels_last)
    flops = 2.0 * channels * skip.numel()  # every voxel of the result has a single tap
    return both_ways(
        lambda: function(x, weight, bias, skip),
        [x, weight, bias, skip],
        [d_joined],
        moved=(size_of(x, d_joined, skip), 2 * size_of(x) + size_of(skip)),
        flops=(flops, 2 * flops),
    )


def block(channels: int, filters: int, size: int) -> dict[str, Any]:
    """Return the sizes of a block of the recipe. Its input has ``size`` voxels along each axis."""
    return {"samples": SAMPLES, "channels": channels, "filters": filters, "volume": (size,) * 3}


SIZES = [FACTS.input_shape[0] >> 1 + level for level in range(len(FACTS.up))]

CASES = (
    Case(
        "small",
        passes,
        block(72, 24, 5),
        tests=[
            {"samples": 2, "volume": (3, 5, 4)},  # several tiles of every kind; the last ones are not full
            {"samples": 1, "channels": 64, "filters": 32, "volume": (4, 4, 8)},  # full tiles
            {"samples": 3, "channels": 20, "filters": 5, "volume": (2, 1, 3), "channels_last": False},
            {"samples": 1, "channels": 1, "filters": 1, "volume": (1, 1, 1)},
        ],
        tf32=True,
    ),
    *(
        Case(
            f"{channels} to {filters} channels at {size}",
            passes,
            block(channels, filters, size),
            gpu={"samples": 2},
            dtypes=(torch.float16, torch.bfloat16),
        )
        for size, (_, channels, filters) in zip(reversed(SIZES), FACTS.up, strict=True)
    ),
)
