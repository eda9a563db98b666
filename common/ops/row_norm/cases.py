"""Cases of RMSNorm and of LayerNorm with weights around zero.

Passes: forward with the residual addition, backward with the residual's gradient, recomputation, and the gradients of
the parameters.
"""

from __future__ import annotations

from typing import Any

import torch

from common.ops.cases import Case, Draw, Pass, rotating
from common.ops.row_norm import RowNorm, forward_reference
from common.ops.sizes import decoder, gpt3


def passes(
    function: RowNorm,
    draw: Draw,
    tokens: int,
    features: int,
    half: bool,
    fp8: bool,
    mean: bool,
    delta: bool = True,
    added: bool = True,
    scale: float = 0.0,
    frozen: bool = False,
) -> list[Pass]:
    """Make the passes of all functions. Inputs rotate, so that they are not in the L2 cache.

    Args:
        half, fp8: whether results are in 16 bits, in FP8, or in both.
        mean: True for LayerNorm, False for RMSNorm.
        delta: whether the result of a linear layer is added to the residual.
        added: whether the bias of that layer is added to the residual.
        scale: FP8 scale that the previous use left; 0 before the first use.
        frozen: leave the scales as they are.
    """
    weight, *shifts = (draw.normal(features, scale=0.25) for _ in range(3 if mean else 1))
    unit, in_fp8 = float(tokens * features * draw.dtype.itemsize), float(tokens * features * fp8)
    small = 1e-7 if fp8 else 1.0  # so that results depend on the scale
    to_e4m3, to_e5m2 = (draw.scaling(factor * scale) if fp8 else None for factor in (1.0, 1e9))

    def inputs() -> tuple[torch.Tensor, ...]:
        """Return a residual with a mean far from zero, its moments, the matrix to add to it, and two gradients."""
        residual = draw.uniform(tokens, features, low=0.0, high=10.0)
        return (
            residual,
            forward_reference(residual, None, weight, gpt3.EPSILON, *shifts[:1]).moments,
            draw.normal(tokens, features),
            *(draw.normal(tokens, features, scale=small) for _ in range(2)),
        )

    sets = rotating(inputs, 4 * unit)

    def forward() -> tuple[Any, ...]:
        residual, _, other, _, _ = next(sets)
        given = residual, other if delta else None, weight, gpt3.EPSILON, *shifts[: 1 + added]
        normed = function.forward(*given, half=half, fp8=to_e4m3, frozen_scales=frozen)
        return normed, normed.residual is residual, to_e4m3

    def backward() -> tuple[Any, ...]:
        residual, moments, _, dy, d_residual = next(sets)
        other = d_residual if delta else None
        return function.backward(dy, residual, moments, weight, other, fp8=to_e5m2, frozen_scales=frozen), to_e5m2

    def recompute() -> torch.Tensor:
        residual, moments, *_ = next(sets)
        return function.recompute(residual, moments, weight, *shifts[:1])

    def parameter_gradients() -> tuple[torch.Tensor, ...]:
        residual, moments, _, dy, dx = next(sets)
        return function.parameter_gradients(dy, residual, moments, *([dx] if mean and added else []))

    return [
        Pass("forward", forward, (1 + 2 * delta + half) * unit + in_fp8),
        Pass("backward", backward, (3 + delta) * unit + in_fp8),
        Pass("recompute", recompute, 2 * unit),
        Pass("parameter gradients", parameter_gradients, (2 + (mean and added)) * unit),
    ]


HALF = {"half": True, "fp8": False}
FP8 = {"half": False, "fp8": True}

DECODER = {"tokens": decoder.TOKENS, "features": decoder.HIDDEN, "mean": False}
RMS_NORM = (
    Case(
        "Llama-2-70B",
        passes,
        {**DECODER, **HALF},
        tests=[
            {"tokens": 13, "features": 96},
            {"tokens": 5, "features": 7, "delta": False},
            {"tokens": 2, "features": 9000},
        ],
        gpu={"tokens": 1003},
    ),
    Case(
        "Llama-2-70B to FP8",
        passes,
        {**DECODER, **FP8},
        tests=[
            {"tokens": 70, "features": 200},
            {"tokens": 70, "features": 200, "half": True, "scale": 3.7},
            {"tokens": 5, "features": 200, "scale": 3.7, "frozen": True},
        ],
        gpu={"tokens": 2048},
        dtypes=(torch.bfloat16,),
    ),
)

GPT3 = {"tokens": gpt3.TOKENS // gpt3.RANKS[0], "features": gpt3.HIDDEN, "mean": True}
LAYER_NORM_1P = (
    Case(
        "GPT-3 on four ranks",
        passes,
        {**GPT3, **FP8},
        tests=[
            {"tokens": 36, "features": 96},
            {"tokens": 17, "features": 30, "half": True, "added": False, "scale": 3.7},
            {"tokens": 9, "features": 70, "scale": 3.7, "frozen": True},
            {"tokens": 9, "features": 24, "half": True, "frozen": True},
        ],
        gpu={"tokens": 512},
        dtypes=(torch.bfloat16,),
    ),
    Case(
        "GPT-3 on four ranks in 16 bits",
        passes,
        {**GPT3, **HALF},
        tests=[  # rows of one, three and five parts; several rows per program; several groups of rows
            {"tokens": 13, "features": 96},
            {"tokens": 5, "features": 1},
            {"tokens": 3, "features": 30, "delta": False, "added": False},
            {"tokens": 2, "features": 1100, "added": False},
            {"tokens": 66, "features": 24, "delta": False},
        ],
        gpu={"tokens": 1003},
    ),
    Case("GPT-3", passes, {**GPT3, **FP8, "tokens": gpt3.TOKENS}, dtypes=(torch.bfloat16,)),
)
