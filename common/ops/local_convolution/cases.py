"""Cases of the convolution of a slab in 3D U-Net: its first layer, and its layers to 32 channels on 7 crops of 128^3.

``triton`` has kernels for one input channel. ``folded`` computes the weight gradient differently for few output
channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.local_convolution import LocalConvolution


def volumes(
    draw: Draw, samples: int, channels: int, volume: Sequence[int], *, channels_last: bool = True, scale: float = 1.0
) -> Tensor:
    """Return normally distributed values (N, C, D, H, W) in the memory format ``channels_last_3d`` or contiguous."""
    x_NCDHW = draw.normal(samples, *volume, channels, scale=scale).permute(0, 4, 1, 2, 3)
    return x_NCDHW if channels_last else x_NCDHW.contiguous()


def passes(
    convolution: LocalConvolution,
    draw: Draw,
    samples: int,
    channels: int,
    filters: int,
    volume: tuple[int, int, int],
    stride: int = 1,
    channels_last: bool = True,
) -> list[Pass]:
    """Make the forward pass, the weight gradient, and the input gradient if there are several input channels.

    Args:
        volume: (D, H, W) of the input.
        channels_last: whether input, weight and gradient are in ``channels_last_3d``.
    """
    x = volumes(draw, samples, channels, volume, channels_last=channels_last)
    weight = volumes(draw, filters, channels, (3, 3, 3), channels_last=channels_last)
    dy = volumes(draw, samples, filters, [(size - 1) // stride + 1 for size in volume], channels_last=channels_last)
    moved, flops = size_of(x, dy, weight), 2.0 * 27 * channels * dy.numel()
    found = [
        Pass("forward", lambda: convolution.forward(x, weight, stride), moved, flops),
        Pass("weight gradient", lambda: convolution.backward(dy, x, weight, stride, (False, True)), moved, flops),
    ]
    if channels > 1:
        input_only = (True, False)
        found.append(
            Pass("input gradient", lambda: convolution.backward(dy, x, weight, stride, input_only), moved, flops)
        )
    return found


SIZES = {"samples": 7, "filters": 32, "volume": (128, 128, 128)}

CASES = (
    Case(
        "3D U-Net, 1 to 32 channels",
        passes,
        {**SIZES, "channels": 1},
        tests=[
            {"samples": 1, "volume": (9, 13, 17)},  # several programs with several tiles, the last tile not full
            {"samples": 2, "filters": 16, "volume": (8, 8, 8), "channels_last": False},  # full tiles
            {"samples": 3, "filters": 24, "volume": (1, 2, 1)},  # taps outside the volume on both sides
            {"samples": 1, "filters": 80, "volume": (6, 5, 7), "stride": 2},  # more filters than one program computes
            {"samples": 2, "filters": 3, "volume": (11, 8, 9), "stride": 2, "channels_last": False},
        ],
        gpu={"samples": 2},
        only=("triton",),
    ),
    *(
        Case(
            f"3D U-Net, {channels} to 32 channels",
            passes,
            {**SIZES, "channels": channels},
            tests=[{"samples": 2, "volume": (5, 9, 16)}],
            gpu={"samples": 1, "volume": (64, 64, 64)},
            dtypes=(torch.float16, torch.bfloat16),
            only=("folded",),
        )
        for channels in (32, 64)
    ),
)
