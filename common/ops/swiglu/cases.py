"""Cases of SwiGLU in 16 bits, and in FP8 with the input saved in FP8."""

from __future__ import annotations

import torch

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.fp8_cast.reference import E4M3, cast_reference
from common.ops.sizes import decoder
from common.ops.swiglu import SwiGlu


def passes(
    function: SwiGlu,
    draw: Draw,
    tokens: int,
    features: int,
    fp8: bool,
    save: bool,
    scales: tuple[float, float, float] = (0.0, 0.0, 0.0),
    frozen: bool = False,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        fp8: whether the result and the gradient are in FP8.
        save: whether the input is saved in FP8.
        scales: FP8 scales of the result, of the saved input and of the gradient; 0 before the first use.
        frozen: leave the scales as they are.
    """
    gate_up = draw.normal(tokens, 2 * features, scale=3.0)
    dy = draw.normal(tokens, features)
    to_e4m3, to_saved, to_e5m2 = (draw.scaling(scale) for scale in scales)
    saved = cast_reference(gate_up, draw.scaling(), E4M3, False) if save else gate_up
    unit, elements = size_of(dy), dy.numel()
    result = elements if fp8 else unit
    saved_bytes = 2 * elements if save else 2 * unit
    d_gate_up_bytes = 2 * elements if fp8 else 2 * unit
    return [
        Pass(
            "forward",
            lambda: (
                function.forward(
                    gate_up, fp8=to_e4m3 if fp8 else None, save_fp8=to_saved if save else None, frozen_scales=frozen
                ),
                to_e4m3,
                to_saved,
            ),
            2 * unit + result + (saved_bytes if save else 0),
        ),
        Pass(
            "backward",
            lambda: (function.backward(dy, saved, fp8=to_e5m2 if fp8 else None, frozen_scales=frozen), to_e5m2),
            unit + saved_bytes + d_gate_up_bytes,
        ),
    ]


SIZES = {"tokens": decoder.TOKENS, "features": decoder.FEED_FORWARD}

CASES = (
    Case(
        "Llama-2-70B",
        passes,
        {**SIZES, "fp8": False, "save": False},
        tests=[{"tokens": 1, "features": 1}, {"tokens": 7, "features": 2100}],
        gpu={"tokens": 1003},
    ),
    Case(
        "Llama-2-70B to FP8",
        passes,
        {**SIZES, "fp8": True, "save": True},
        tests=[
            {"tokens": 2, "features": 130},
            {"tokens": 9, "features": 2100, "scales": (2.1, 3.7, 37.0)},
            {"tokens": 9, "features": 140, "scales": (2.1, 3.7, 37.0), "frozen": True},
            {"tokens": 9, "features": 140, "scales": (2.1, 0.0, 37.0), "save": False},
            {"tokens": 2, "features": 140, "fp8": False},
        ],
        gpu={"tokens": 2048},
        dtypes=(torch.bfloat16,),
    ),
)
