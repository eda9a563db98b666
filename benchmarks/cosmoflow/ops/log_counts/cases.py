"""Cases of the logarithm: the input of the network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cosmoflow.ops.sizes import FACTS, SAMPLES
from benchmarks.cosmoflow.samples import REDSHIFTS
from common.ops.cases import Case, Draw, Pass, rotating


def passes(function: Callable[..., Tensor], draw: Draw, samples: int, size: int, channels: int) -> list[Pass]:
    """Make the only pass, over cubes of ``size`` voxels along each axis. Its inputs rotate through the L2 cache."""
    dtype = torch.float64 if draw.fp64 else draw.dtype
    elements = samples * size**3 * channels

    def counts() -> Tensor:
        return draw.integers(0, 300, samples, size, size, size, channels, dtype=torch.int16)

    inputs = rotating(counts, 2.0 * elements)
    moved = elements * (2.0 + draw.dtype.itemsize)
    return [Pass("forward", lambda: function(next(inputs), dtype), moved)]


CASES = (
    Case(
        "input of the network",
        passes,
        {"samples": SAMPLES, "size": FACTS.size, "channels": REDSHIFTS},
        tests=[
            {"samples": 4, "size": 8},  # two whole tiles
            {"samples": 5, "size": 9, "channels": 3},  # three tiles; the last one is not full
        ],
        gpu={"samples": 1, "size": 65},
    ),
)
