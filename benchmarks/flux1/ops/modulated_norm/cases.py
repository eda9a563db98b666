"""Cases of LayerNorm with modulation: a single block of FLUX.1, before linear layers in 16 bits or in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.flux1.ops import sizes
from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.fp8_cast.reference import Fp8Tensor


def passes(
    function: Callable[..., Any],
    draw: Draw,
    samples: int,
    tokens: int,
    features: int,
    chunks: int = 3,
    read: tuple[int, ...] = (0, 1),
    y8: bool = False,
    scale: float = 0.0,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        tokens: rows of each sample.
        chunks: parts of a row of the modulation, of which shift and scale are the first two; 0 for separate tensors.
        read: indices of the results that have a gradient: 0 is x, 1 is y.
        y8: whether y is in FP8.
        scale: FP8 scale that the previous use left; 0 before the first use.
    """
    x = draw.uniform(samples * tokens, features, low=-2.0, high=8.0).requires_grad_()
    gradients = [draw.normal(samples * tokens, features) for _ in range(2)]
    modulation = [draw.normal(samples, max(chunks, 1) * features).requires_grad_() for _ in range(1 if chunks else 2)]
    fp8 = draw.scaling(scale) if y8 else None

    def forward() -> list[Any]:
        shift, factor = modulation[0].chunk(chunks, 1)[:2] if chunks else modulation
        again, y = function(x, factor, shift, sizes.FACTS.norm_epsilon, fp8=fp8)
        return [again, y.source, y, fp8] if isinstance(y, Fp8Tensor) else [again, y]

    def backward() -> tuple[Any, ...]:
        results, leaves = forward(), [x, *modulation]
        used = [results[index] for index in read]
        return torch.autograd.grad(used, leaves, [gradients[index] for index in read], allow_unused=True)

    def results() -> list[Any]:
        found = forward()
        return [found[0], *found[2:]] if y8 else found

    unit = size_of(x)
    return [
        Pass("forward", results, unit + (x.numel() if y8 else unit)),
        Pass("backward", backward, (2 + len(read)) * unit, after="forward"),
    ]


SIZES = {"samples": sizes.SAMPLES, "tokens": sizes.FACTS.length, "features": sizes.FACTS.hidden}

CASES = (
    Case(
        "FLUX.1",
        passes,
        SIZES,
        tests=[
            {"samples": 3, "tokens": 7, "features": 48},
            {"samples": 2, "tokens": 20, "features": 1, "read": (1,), "chunks": 0},
            {"samples": 1, "tokens": 3, "features": 1100, "chunks": 2},
            {"samples": 2, "tokens": 2, "features": 24, "read": (0,)},
        ],
        gpu={"samples": 3, "tokens": 301},
        dtypes=sizes.DTYPES,
    ),
    Case(
        "FLUX.1 to FP8",
        passes,
        {**SIZES, "y8": True},
        tests=[
            {"samples": 3, "tokens": 37, "features": 80},
            {"samples": 2, "tokens": 5, "features": 80, "scale": 3.7},
        ],
        gpu={"samples": 3, "tokens": 304},
        dtypes=(torch.bfloat16,),
    ),
)
