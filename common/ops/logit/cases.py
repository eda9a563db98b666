"""Cases of the logit, the last layer of DLRM's top MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import recommendation


def passes(function: Callable[..., Tensor], draw: Draw, samples: int, inputs: int) -> list[Pass]:
    """Make the forward and backward passes."""
    x, weight, bias = draw.normal(samples, inputs), draw.normal(1, inputs), draw.normal(1)
    dlogit = draw.normal(samples, dtype=torch.float32)
    flops = 2.0 * x.numel()
    return both_ways(
        lambda: function(x, weight, bias),
        [x, weight, bias],
        [dlogit],
        moved=(size_of(x, dlogit), 2 * size_of(x) + size_of(dlogit)),
        flops=(flops, 2 * flops),
    )


CASES = (
    Case(
        "DLRM",
        passes,
        {"samples": recommendation.SAMPLES, "inputs": recommendation.LAST_INPUTS},
        tests=[
            {"samples": 256, "inputs": 64},
            {"samples": 300, "inputs": 40},
            {"samples": 19, "inputs": 700},
            {"samples": 0, "inputs": 8},
        ],
        gpu={"samples": 6911},
    ),
)
