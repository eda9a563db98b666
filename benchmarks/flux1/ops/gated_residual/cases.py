"""Cases of the gate and the residual: FLUX.1's blocks, after one or two linear layers in 16 bits or in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.flux1.ops import sizes
from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.fp8_cast.reference import Handover


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    tokens: int,
    features: int,
    two: bool,
    chunks: int = 3,
    fp8: bool = False,
    scale: float = 0.0,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        tokens: rows of each sample.
        two: whether the branch is the sum of two products.
        chunks: parts of a row of the modulation, of which the gate is the last.
        fp8: whether the gradient of the products is in FP8.
        scale: FP8 scale that the previous use left; 0 before the first use.
    """
    x, delta, dy = (draw.normal(samples * tokens, features) for _ in range(3))
    other = draw.normal(samples * tokens, features) if two else None
    bias, modulation = draw.normal(features), draw.normal(samples, chunks * features)
    handovers = [Handover(draw.scaling(scale) if fp8 else None) for _ in range(1 + two)]
    leaves = [each.requires_grad_() for each in (x, delta, other, bias, modulation) if each is not None]

    def forward() -> Tensor:
        return function(x, delta, other, bias, modulation.chunk(chunks, 1)[-1], handovers=handovers)

    def backward() -> tuple[Any, ...]:
        d_x, *d_products, d_bias, d_modulation = torch.autograd.grad(forward(), leaves, dy)
        found = [handover.take() for handover in handovers] if fp8 else d_products
        return d_x, found, d_bias, d_modulation, handovers[0].scaling

    unit = size_of(x)
    return [
        Pass("forward", forward, (3 + two) * unit),
        Pass("backward", backward, (2 + two) * unit + (x.numel() if fp8 else unit), after="forward"),
    ]


SIZES = {"samples": sizes.SAMPLES, "tokens": sizes.FACTS.length, "features": sizes.FACTS.hidden, "two": True}
STREAM = {**SIZES, "tokens": sizes.FACTS.image_length, "two": False}

CASES = (
    Case(
        "FLUX.1, single block",
        passes,
        SIZES,
        tests=[{"samples": 3, "tokens": 7, "features": 48}, {"samples": 1, "tokens": 3, "features": 1100}],
        gpu={"samples": 3, "tokens": 301},
        dtypes=sizes.DTYPES,
    ),
    Case(
        "FLUX.1, double block",
        passes,
        STREAM,
        tests=[{"samples": 2, "tokens": 20, "features": 1, "chunks": 1}, {"samples": 5, "tokens": 1, "features": 24}],
        gpu={"samples": 3, "tokens": 301},
        dtypes=sizes.DTYPES,
    ),
    Case(
        "FLUX.1, single block to FP8",
        passes,
        {**SIZES, "fp8": True},
        tests=[
            {"samples": 3, "tokens": 37, "features": 80},
            {"samples": 2, "tokens": 5, "features": 80, "scale": 370.0},
            {"samples": 2, "tokens": 5, "features": 1040, "scale": 370.0, "two": False},
        ],
        gpu={"samples": 3, "tokens": 304},
        dtypes=(torch.bfloat16,),
    ),
)
