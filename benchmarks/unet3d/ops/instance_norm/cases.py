"""Cases of the norms after the convolutions. The result of a norm before a skip connection has two readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.unet3d.ops.sizes import FACTS, SAMPLES
from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.local_convolution.cases import volumes

HELD_VOXELS = 16**3
"""Largest number of voxels of an instance for which a norm reads its input once."""

CORNER = 1e-3
"""Distance from the corner of the ReLU below which gradients are zero, because rounding decides whether they pass."""


def passes(
    function: Callable[..., tuple[Tensor, Tensor]],
    draw: Draw,
    samples: int,
    channels: int,
    volume: tuple[int, int, int],
    readers: Sequence[int],
    parameters: torch.dtype = torch.float32,
    channels_last: bool = True,
) -> list[Pass]:
    """Return forward and backward pass. Every channel has a different mean and standard deviation.

    Args:
        volume: (D, H, W).
        readers: indices of the results that have a gradient: 0, 1 or both. The gradient of the second result is a
            slice of concatenated channels.
        parameters: dtype of weight and bias.
        channels_last: memory format of the input.
    """
    spread, shift = (draw.normal(channels, 1, 1, 1, dtype=torch.float32).float() for _ in range(2))
    values = volumes(draw, samples, channels, volume, channels_last=channels_last)
    x = draw.rounded(values.float() * (1 + spread.abs()) + shift)
    weight = draw.uniform(channels, low=0.5, high=1.5, dtype=parameters)
    bias = draw.normal(channels, scale=0.5, dtype=parameters)
    joined = volumes(draw, samples, 2 * channels, volume)
    gradients = [volumes(draw, samples, channels, volume), joined[:, channels:]]
    for number in range(samples):
        one, *affine = (tensor.double() for tensor in (x[number : number + 1], weight, bias))
        corner = F.instance_norm(one, weight=affine[0], bias=affine[1], eps=FACTS.norm_epsilon).abs() < CORNER
        for dy in gradients:
            dy[number : number + 1].masked_fill_(corner, 0)
    unit = size_of(x)
    times = (2, 2 + len(readers)) if x[0, 0].numel() <= HELD_VOXELS else (3, 3 + 2 * len(readers))

    def results() -> tuple[Tensor, ...]:
        return function(x, weight, bias, FACTS.norm_epsilon)

    def read() -> tuple[Tensor, ...]:
        both = results()
        return tuple(both[reader] for reader in readers)

    forward, backward = both_ways(
        read,
        [x, weight, bias],
        [gradients[reader] for reader in readers],
        moved=(times[0] * unit, times[1] * unit),
    )
    return [forward._replace(run=results), backward]


def layer(channels: int, size: int, readers: Sequence[int]) -> dict[str, object]:
    """Return the sizes of a norm of the recipe."""
    return {"samples": SAMPLES, "channels": channels, "volume": (size,) * 3, "readers": readers}


CASES = (
    Case(
        "32 channels at 128",
        passes,
        layer(32, 128, (0,)),
        tests=[
            {"samples": 1, "channels": 3, "volume": (17, 16, 18)},  # large: several programs of several tiles
            {"samples": 2, "channels": 2, "volume": (16, 16, 32), "channels_last": False},  # large: full tiles
            {"samples": 3, "channels": 24, "volume": (3, 5, 4)},  # small
            {"samples": 1, "volume": (8, 8, 16)},  # small: full tiles
        ],
        gpu={"samples": 1},
    ),
    Case(
        "32 channels at 128, read twice",
        passes,
        layer(32, 128, (0, 1)),
        tests=[
            {"samples": 2, "channels": 3, "volume": (10, 11, 12)},  # small forward, large backward
            {"samples": 3, "channels": 24, "volume": (3, 5, 4)},
            {"samples": 2, "channels": 3, "volume": (4, 5, 3), "readers": (1,)},
            {"samples": 20, "channels": 5, "volume": (2, 3, 4)},  # more samples than are added at once
        ],
        gpu={"samples": 1},
        library_tolerance=1.5,  # PyTorch adds the two gradients in 16 bits
    ),
    *(
        Case(
            f"{channels} channels at {size}{', read twice' if len(readers) == 2 else ''}",
            passes,
            layer(channels, size, readers),
            gpu={"samples": 2},
        )
        for channels, size in ((64, 64), (128, 32), (256, 16), (320, 8))
        for readers in ((0,), (0, 1))
    ),
    Case("320 channels at 4", passes, layer(320, 4, (0,)), gpu={}),
    Case(
        "parameters in bf16",
        passes,
        {**layer(128, 32, (0,)), "parameters": torch.bfloat16},
        tests=[
            {"samples": 1, "channels": 24, "volume": (3, 5, 4)},
            {"samples": 2, "channels": 8, "volume": (3, 5, 4)},
        ],
        gpu={"samples": 2},
        dtypes=(torch.bfloat16,),
        only=("triton",),
    ),
)
