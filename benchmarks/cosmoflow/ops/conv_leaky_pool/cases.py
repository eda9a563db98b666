"""Cases of bias, LeakyReLU and max-pool: the five convolutions of the network."""

from __future__ import annotations

import math

import torch

from benchmarks.cosmoflow.ops.conv_leaky_pool import BELOW, PoolPasses
from benchmarks.cosmoflow.ops.sizes import FACTS, SAMPLES
from common.ops.cases import Case, Draw, Pass, rotating
from common.ops.local_convolution.cases import volumes


def passes(
    pool: PoolPasses,
    draw: Draw,
    samples: int,
    channels: int,
    volume: tuple[int, int, int],
    channels_last: bool = True,
    equal: bool = False,
) -> list[Pass]:
    """Make both passes. Their inputs rotate, so that they are not in the L2 cache.

    Args:
        volume: (D, H, W) of the result.
        equal: round the convolved volume to whole numbers, so that windows have several largest voxels.
    """
    fine = [2 * edge for edge in volume]
    bias = draw.normal(channels)
    voxels = float(samples * channels * math.prod(volume))
    large, small = 8 * voxels * draw.dtype.itemsize, voxels * draw.dtype.itemsize

    def convolved() -> torch.Tensor:
        z = volumes(draw, samples, channels, fine, channels_last=channels_last)
        return z.round() if equal else z

    def gradient() -> tuple[torch.Tensor, torch.Tensor]:
        codes = draw.integers(0, 2 * BELOW, samples, *volume, channels, dtype=torch.int8).movedim(-1, 1)
        dy = volumes(draw, samples, channels, volume, channels_last=channels_last)
        return dy, codes if channels_last else codes.contiguous()

    inputs, gradients = rotating(convolved, large), rotating(gradient, small + voxels)
    moved = large + small + voxels  # a code is one byte
    return [
        Pass("forward", lambda: pool.forward(next(inputs), bias, FACTS.slope), moved),
        Pass("backward", lambda: pool.backward(*next(gradients), FACTS.slope), moved),
    ]


TESTS = [
    {"samples": 2, "channels": 32, "volume": (4, 4, 8)},  # whole tiles
    {"samples": 3, "channels": 5, "volume": (1, 3, 2)},  # the only tile is not full
    {"samples": 1, "channels": 192, "volume": (2, 3, 7), "equal": True},  # two tiles per program, one not full
    {"samples": 2, "channels": 16, "volume": (3, 2, 1), "channels_last": False},
]

CASES = tuple(
    Case(
        f"layer {layer}: {channels} channels at {FACTS.size >> (layer - 1)}",
        passes,
        {"samples": SAMPLES, "channels": channels, "volume": (FACTS.size >> layer,) * 3},
        tests=TESTS if layer == 1 else (),
        gpu={"samples": 1},
    )
    for layer, channels in enumerate(FACTS.filters, 1)
)
