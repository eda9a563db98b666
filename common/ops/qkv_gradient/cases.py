"""Cases of the gradient of the QKV product, joined from the gradients of queries, keys and values.

Passes: to FP8 with and without a transpose, joined in 16 bits, and only the sums for the bias if attention has written
the joined gradient itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, rotating
from common.ops.qkv_gradient import JoinQkv
from common.ops.sizes import gpt3


def passes(
    function: JoinQkv,
    draw: Draw,
    tokens: int,
    heads: int,
    head_size: int,
    layout: str = "separate",
    scale: float = 0.0,
    frozen: bool = False,
) -> list[Pass]:
    """Make all passes. Inputs rotate, so that they are not in the L2 cache.

    Args:
        layout: layout of the three gradients: ``separate`` tensors, ``mixed`` strides, or ``packed`` (views of one
            tensor).
        scale: FP8 scale that the previous use left; 0 before the first use.
        frozen: leave the scales as they are.
    """
    elements = 3.0 * tokens * heads * head_size
    unit = elements * draw.dtype.itemsize

    def packed() -> tuple[Tensor, ...]:
        return draw.normal(tokens, heads, 3, head_size, scale=1e-6).unbind(2)

    def given() -> tuple[Tensor, ...]:
        q, k, v = packed()
        if layout == "packed":
            return q, k, v
        mixed = layout == "mixed"
        return (
            q.contiguous(),
            k.transpose(0, 1).contiguous().transpose(0, 1) if mixed else k.contiguous(),
            (v if mixed else v.contiguous()),
        )

    sets, in_place = rotating(given, unit), rotating(packed, unit)
    first, second = (draw.scaling(1e8 * scale) for _ in range(2))
    options: dict[str, Any] = {"half": False, "frozen_scales": frozen}

    def join_in_place() -> tuple[Any, ...]:
        parts = next(in_place)
        found = function(*parts)
        assert found.d_qkv is not None
        return found, found.d_qkv.data_ptr() == parts[0].data_ptr()

    return [
        Pass("to FP8", lambda: (function(*next(sets), fp8=first, **options), first), unit + elements),
        Pass(
            "to FP8 in both orders",
            lambda: (function(*next(sets), fp8=second, transpose=True, **options), second),
            unit + 2 * elements,
        ),
        Pass("joined", lambda: function(*next(sets)), 2 * unit),
        Pass("in place", join_in_place, unit),
    ]


SIZES = {"tokens": gpt3.TOKENS, "heads": gpt3.HEADS // gpt3.RANKS[0], "head_size": gpt3.HEAD_SIZE}

CASES = (
    Case(
        "GPT-3 on four ranks",
        passes,
        SIZES,
        tests=[
            {"tokens": 70, "heads": 2, "head_size": 16, "layout": "mixed"},
            {"tokens": 64, "heads": 2, "head_size": 8, "layout": "packed", "scale": 3.7},
            {"tokens": 5, "heads": 1, "head_size": 6, "layout": "mixed", "scale": 3.7, "frozen": True},
            {"tokens": 9, "heads": 1, "head_size": 24, "frozen": True},
        ],
        gpu={"tokens": 1024, "layout": "mixed"},
    ),
    Case("GPT-3", passes, {**SIZES, "heads": gpt3.HEADS}, dtypes=(torch.bfloat16,)),
)
