"""Cases of the first convolution with bias, LeakyReLU and max-pool.

Inputs and weights are whole numbers, whose sums are exact, so that every implementation finds the same largest voxels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.cosmoflow.ops.conv_leaky_pool import BELOW
from benchmarks.cosmoflow.ops.first_convolution import FirstConvolutionPasses
from benchmarks.cosmoflow.ops.sizes import FACTS, SAMPLES
from benchmarks.cosmoflow.samples import REDSHIFTS
from common.ops.cases import Case, Draw, Pass, rotating
from common.ops.local_convolution.cases import volumes


def passes(
    convolution: FirstConvolutionPasses,
    draw: Draw,
    samples: int,
    inputs: int,
    channels: int,
    volume: tuple[int, int, int],
    channels_last: bool = True,
) -> list[Pass]:
    """Make both passes. Their inputs rotate, so that they are not in the L2 cache.

    Args:
        volume: (D, H, W) of the result.
    """
    bias = draw.normal(channels)
    weight = volumes(draw, channels, inputs, (3, 3, 3)).round()
    voxels = float(samples * math.prod(volume))
    read = 8 * voxels * inputs * draw.dtype.itemsize
    written = voxels * channels * (draw.dtype.itemsize + 1)  # a code is one byte

    def source() -> Tensor:
        return volumes(draw, samples, inputs, [2 * edge for edge in volume], channels_last=channels_last).round()

    def gradient() -> tuple[Tensor, Tensor, Tensor]:
        codes = draw.integers(0, 2 * BELOW, samples, *volume, channels, dtype=torch.int8).movedim(-1, 1)
        dy = volumes(draw, samples, channels, volume, channels_last=channels_last)
        return dy, codes if channels_last else codes.contiguous(), convolution.forward(source(), weight, bias, 1.0)[2]

    sources, gradients = rotating(source, read), rotating(gradient, read + written)
    flops = 2.0 * 27 * inputs * channels * 8 * voxels
    return [
        Pass(
            "forward",
            lambda: convolution.forward(next(sources), weight, bias, FACTS.slope)[:2],
            read + written,
            flops,
        ),
        Pass("backward", lambda: convolution.backward(*next(gradients), FACTS.slope), read + written, flops),
    ]


CASES = (
    Case(
        "conv1",
        passes,
        {"samples": SAMPLES, "inputs": REDSHIFTS, "channels": FACTS.filters[0], "volume": (FACTS.size // 2,) * 3},
        tests=[
            {"samples": 2, "volume": (4, 4, 8)},  # two whole tiles
            {"samples": 3, "channels": 5, "volume": (1, 3, 2)},  # the only tile is not full
            {"samples": 2, "inputs": 3, "channels": 17, "volume": (3, 5, 9), "channels_last": False},  # three tiles
        ],
        gpu={"samples": 1},
    ),
)
