"""Cases of RMSNorm: residual addition, backward with the residual's gradient, once more, and the weight's gradient."""

from __future__ import annotations

import torch

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.rms_norm.reference import RmsNorm
from common.ops.sizes import decoder


def passes(
    function: RmsNorm,
    draw: Draw,
    tokens: int,
    features: int,
    added: bool,
    half: bool,
    fp8: bool,
    scale: float = 0.0,
    frozen: bool = False,
) -> list[Pass]:
    """All functions, with results in 16 bits (``half``), FP8 or both; ``scale`` is that of FP8's use before."""
    residual, delta, dy, d_residual = (draw.normal(tokens, features) for _ in range(4))
    weight = draw.normal(features)
    other = delta if added else None
    to_e4m3, to_e5m2 = (draw.scaling(scale) if fp8 else None for _ in range(2))
    normed = function.forward(residual, other, weight, decoder.EPSILON)
    unit = size_of(residual)
    written = unit * half + residual.numel() * fp8
    return [
        Pass(
            "forward",
            lambda: (
                function.forward(
                    residual, other, weight, decoder.EPSILON, half=half, fp8=to_e4m3, frozen_scales=frozen
                ),
                to_e4m3,
            ),
            (1 + 2 * added) * unit + written,
        ),
        Pass(
            "backward",
            lambda: (
                function.backward(
                    dy,
                    normed.residual,
                    normed.inverse_rms,
                    weight,
                    d_residual if added else None,
                    fp8=to_e5m2,
                    frozen_scales=frozen,
                ),
                to_e5m2,
            ),
            (3 + added) * unit + residual.numel() * fp8,
        ),
        Pass("recompute", lambda: function.recompute(normed.residual, normed.inverse_rms, weight), 2 * unit),
        Pass(
            "weight gradient",
            lambda: function.weight_gradient(dy, normed.residual, normed.inverse_rms),
            2 * unit,
        ),
    ]


SIZES = {"tokens": decoder.TOKENS, "features": decoder.HIDDEN}

CASES = (
    Case(
        "Llama-2-70B",
        passes,
        {**SIZES, "added": True, "half": True, "fp8": False},
        tests=[
            {"tokens": 13, "features": 96},
            {"tokens": 5, "features": 7, "added": False},
            {"tokens": 2, "features": 9000},
        ],
        gpu={"tokens": 1003},
    ),
    Case(
        "Llama-2-70B to FP8",
        passes,
        {**SIZES, "added": True, "half": False, "fp8": True},
        tests=[
            {"tokens": 70, "features": 200},
            {"tokens": 70, "features": 200, "half": True, "scale": 3.7},
            {"tokens": 5, "features": 200, "scale": 3.7, "frozen": True},
        ],
        gpu={"tokens": 2048},
        dtypes=(torch.bfloat16,),
    ),
)
