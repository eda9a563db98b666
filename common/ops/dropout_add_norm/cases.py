"""Cases of the end of a sub-layer (dropout, residual, norm), between linear layers in 16 bits or in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Fp8Tensor, Handover
from common.ops.sizes import transformer as size

EPSILON = 1e-12


def passes(
    function: Callable[..., Any],
    draw: Draw,
    tokens: int,
    features: int,
    p: float,
    biased: bool = True,
    residual: bool = True,
    readers: tuple[int, ...] | None = (0, 1),
    parameters: torch.dtype | None = None,
    y8: bool = False,
    dx8: bool = False,
    scale: float = 0.0,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        readers: indices of the results that have a gradient; None if there is only one result.
        parameters: dtype of the norm's parameters; None for that of the activations.
        y8: whether the first result is in FP8.
        dx8: whether the gradient of the input is in FP8.
        scale: FP8 scale that the previous use left; 0 before the first use.
    """
    x = draw.normal(tokens, features)
    bias = draw.normal(features) if biased else None
    added = draw.uniform(tokens, features, low=1.0, high=5.0) if residual else None
    weight, norm_bias = (draw.normal(features, dtype=parameters) for _ in range(2))
    # the reference rounds the sum of these gradients, so it must be exact in every dtype
    d_results = [draw.rounded(draw.integers(-16, 17, tokens, features) / 8) for _ in range(2)]
    leaves = [leaf.requires_grad_() for leaf in (x, bias, added, weight, norm_bias) if leaf is not None]
    fp8, handover = draw.scaling(scale) if y8 else None, Handover(draw.scaling(100 * scale) if dx8 else None)
    mask = DropoutMask(p, draw.seed(), size.SITE)

    def forward() -> list[Any]:
        given = (x, bias, added, weight, norm_bias, EPSILON, mask)
        results = function(*given, twice=readers is not None, fp8=fp8, handover=handover)
        first, *second = results if readers is not None else (results,)
        return [first.source, *second, first, fp8] if isinstance(first, Fp8Tensor) else [first, *second]

    def backward() -> tuple[Any, ...]:
        results, used = forward(), readers or (0,)
        d_x, *others = torch.autograd.grad(
            [results[reader] for reader in used], leaves, [d_results[reader] for reader in used]
        )
        return handover.take() if dx8 else d_x, others, handover.scaling

    unit, in_fp8 = size_of(x), float(x.numel())
    return [
        Pass("forward", forward, (2 + residual) * unit + in_fp8 * y8),
        Pass("backward", backward, (4 + residual) * unit + (in_fp8 if dx8 else unit), after="forward"),
    ]


SIZES = {"tokens": size.PACKS * size.LENGTH, "features": size.HIDDEN, "p": size.PROBABILITY}

CASES = (
    Case(
        "BERT-large",
        passes,
        SIZES,
        tests=[
            {"tokens": 21, "features": 96},
            {"tokens": 13, "features": 7, "biased": False, "readers": (1,)},
            {"tokens": 6, "features": 1000, "residual": False, "readers": (0,), "parameters": torch.float32},
            {"tokens": 13, "features": 64, "biased": False, "residual": False, "readers": None, "p": 0.0},
        ],
        gpu={"tokens": 3001},
    ),
    Case(
        "BERT-large to FP8",
        passes,
        {**SIZES, "y8": True, "dx8": True},
        tests=[
            {"tokens": 21, "features": 80, "scale": 3.7},
            {"tokens": 9, "features": 80, "scale": 3.7, "biased": False, "readers": None, "dx8": False},
            {"tokens": 3, "features": 7, "residual": False, "readers": (1,), "y8": False},
        ],
        gpu={"tokens": 3008},
        dtypes=(torch.bfloat16,),
    ),
)
