"""Cases of GELU between linear layers: with autograd at the sizes of BERT and FLUX.1, without it at those of GPT-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from common.ops.bias_gelu import BiasGelu
from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.fp8_cast.reference import E4M3, Fp8Tensor, Handover, cast_reference
from common.ops.sizes import diffusion, gpt3, transformer


def passes(
    function: Callable[..., Any],
    draw: Draw,
    tokens: int,
    features: int,
    y8: bool = False,
    dx8: bool = False,
    scale: float = 0.0,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        y8: whether the result is in FP8.
        dx8: whether the gradient of the input is in FP8.
        scale: FP8 scale that the previous use left; 0 before the first use.
    """
    # smaller for FP8, which shows relative errors: far below 0, the reference's gradient in fp32 has no correct digits
    x = draw.normal(tokens, features, scale=1.5 if dx8 else 3.0).requires_grad_()
    bias = draw.normal(features).requires_grad_()
    dy, fp8 = draw.normal(tokens, features), draw.scaling(scale) if y8 else None
    handover = Handover(draw.scaling(100 * scale) if dx8 else None)

    def forward() -> Any:
        return function(x, bias, fp8=fp8, handover=handover), fp8

    def backward() -> tuple[Any, ...]:
        y, _ = forward()
        d_x, d_bias = torch.autograd.grad(y.source if isinstance(y, Fp8Tensor) else y, [x, bias], dy)
        return handover.take() if dx8 else d_x, d_bias, handover.scaling

    unit, in_fp8 = size_of(x), float(x.numel())
    return [
        Pass("forward", forward, unit + (in_fp8 if y8 else unit)),
        Pass("backward", backward, 2 * unit + (in_fp8 if dx8 else unit), after="forward"),
    ]


def separate_passes(
    function: BiasGelu,
    draw: Draw,
    tokens: int,
    features: int,
    biased: bool = True,
    fp8: bool = True,
    frozen: bool = False,
    scale: float = 0.0,
) -> list[Pass]:
    """Make the forward and backward passes, once with the product saved in 16 bits and once with the sum in FP8.

    Args:
        fp8: whether results and gradients are in FP8.
        frozen: leave the scales as they are.
        scale: FP8 scale that the previous use left; 0 before the first use.
    """
    x, dy = draw.normal(tokens, features, scale=2.0), draw.normal(tokens, features, scale=1e-6 if fp8 else 1.0)
    bias = draw.normal(features) if biased else None
    saved = cast_reference(x, draw.scaling(20.0), E4M3, False)
    to_e4m3 = [draw.scaling(factor * scale) if fp8 else None for factor in (1, 2)]
    to_e5m2 = [draw.scaling(1e8 * scale) if fp8 else None for _ in range(2)]
    save = draw.scaling(scale)

    def forward(number: int, **options: Any) -> tuple[Any, ...]:
        given = {"fp8": to_e4m3[number], "frozen_scales": frozen, **options}
        return function.forward(x, bias, **given), to_e4m3[number], save

    def backward(number: int, kept: Any) -> tuple[Any, ...]:
        return function.backward(dy, kept, bias, fp8=to_e5m2[number], frozen_scales=frozen), to_e5m2[number]

    unit, in_fp8 = size_of(x), float(x.numel())
    written = in_fp8 if fp8 else unit
    return [
        Pass("forward", lambda: forward(0), unit + written),
        Pass("backward", lambda: backward(0, x), 2 * unit + written),
        Pass("saving forward", lambda: forward(1, save_fp8=save), unit + in_fp8 + written),
        Pass("saved backward", lambda: backward(1, saved), unit + in_fp8 + written),
    ]


BERT = {"tokens": transformer.PACKS * transformer.LENGTH, "features": transformer.FEED_FORWARD}
FLUX = {"tokens": diffusion.FLUX.samples * diffusion.FLUX.tokens, "features": diffusion.FLUX.feed_forward}
EDGES = {"tokens": 40, "features": 528}

CASES = (
    Case(
        "BERT-large",
        passes,
        BERT,
        tests=[{"tokens": 1, "features": 1}, {"tokens": 37, "features": 200}, {"tokens": 5, "features": 1030}],
        gpu={"tokens": 3001},
    ),
    Case(
        "BERT-large to FP8",
        passes,
        {**BERT, "y8": True, "dx8": True},
        tests=[{"tokens": 16, "features": 16}, {**EDGES, "scale": 3.7}, {**EDGES, "dx8": False}],
        gpu={"tokens": 3008},
        dtypes=(torch.bfloat16,),
    ),
    Case("FLUX.1", passes, FLUX, dtypes=(torch.bfloat16,)),
    Case("FLUX.1 to FP8", passes, {**FLUX, "y8": True, "dx8": True}, dtypes=(torch.bfloat16,)),
)

GPT3 = {"tokens": gpt3.TOKENS, "features": gpt3.FEED_FORWARD // gpt3.RANKS[0]}

SEPARATE = (
    Case(
        "GPT-3 on four ranks",
        separate_passes,
        GPT3,
        tests=[
            {"tokens": 40, "features": 600},
            {"tokens": 80, "features": 200, "biased": False, "scale": 100.0},
            {"tokens": 16, "features": 40, "frozen": True},
            {"tokens": 16, "features": 40, "frozen": True, "scale": 3.7},
        ],
        gpu={"tokens": 1024},
        dtypes=(torch.bfloat16,),
    ),
    Case(
        "GPT-3 on four ranks in 16 bits",
        separate_passes,
        {**GPT3, "fp8": False},
        tests=[{"tokens": 17, "features": 1030}, {"tokens": 9, "features": 200, "biased": False}],
        gpu={"tokens": 1003},
    ),
    Case("GPT-3", separate_passes, {**GPT3, "features": gpt3.FEED_FORWARD}, dtypes=(torch.bfloat16,)),
)
