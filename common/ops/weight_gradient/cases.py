"""Cases of the weight gradient from FP8 operands: the QKV product of Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.fp8_cast.reference import E4M3, E5M2

DY_SCALE, X_SCALE = 256.0, 16.0


def passes(
    function: Callable[..., None],
    draw: Draw,
    outputs: int,
    inputs: int,
    tokens: int,
    dy_format: torch.dtype,
    offset: int,
    exact: bool,
) -> list[Pass]:
    """Make the pass, which adds to a gradient at ``offset`` elements from the start of a bucket.

    With ``exact``, the operands are -1, 0 and 1 times their scales, so that sums are exact in every precision.
    """

    def operand(rows: int, scale: float, dtype: torch.dtype) -> Tensor:
        values = draw.integers(-1, 2, rows, tokens) if exact else draw.normal(rows, tokens, dtype=torch.float32)
        return (values * scale).to(dtype)

    def scratch(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=draw.device)

    dy, x = operand(outputs, DY_SCALE, dy_format), operand(inputs, X_SCALE, E4M3)
    dy_inverse, x_inverse = (torch.full((), 1 / scale, device=draw.device) for scale in (DY_SCALE, X_SCALE))
    weights = outputs * inputs
    bucket = draw.integers(-8, 9, offset + weights + 16, dtype=draw.dtype)
    gradient = bucket[offset : offset + weights].view(outputs, inputs)

    def add() -> Tensor:
        function(dy, x, dy_inverse, x_inverse, gradient, scratch)
        return bucket

    return [Pass("addition", add, size_of(dy, x, gradient, gradient), 2.0 * weights * tokens)]


CASES = (
    Case(
        "Llama-3.1-8B QKV",
        passes,
        {"outputs": 6144, "inputs": 4096, "tokens": 8192, "dy_format": E5M2, "offset": 0, "exact": False},
        tests=[
            {"outputs": 48, "inputs": 32, "tokens": 64, "exact": True},
            {"outputs": 1040, "inputs": 528, "tokens": 1008, "exact": True, "offset": 8},
            {"outputs": 512, "inputs": 256, "tokens": 1024, "exact": True, "dy_format": E4M3},
        ],
        gpu={"tokens": 1024, "exact": True},
        dtypes=(torch.float32, torch.bfloat16),
        exact=True,
    ),
)
