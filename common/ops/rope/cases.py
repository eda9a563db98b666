"""Cases of rotary position embeddings: forward splits the QKV product; its gradient is in 16 bits, FP8 or both."""

from __future__ import annotations

import torch

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.rope import Rope, tables
from common.ops.sizes import decoder


def passes(
    function: Rope,
    draw: Draw,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    half: bool,
    fp8: bool,
    scale: float = 0.0,
    frozen: bool = False,
) -> list[Pass]:
    """Make the forward and backward passes.

    Args:
        half, fp8: whether the gradient is in 16 bits, in FP8, or in both.
        scale: FP8 scale that the previous use left; 0 before the first use.
        frozen: leave the scale as it is.
    """
    qkv = draw.normal(tokens, (heads + 2 * kv_heads) * head_size)
    gradients = [draw.normal(tokens, count, head_size) for count in (heads, kv_heads, kv_heads)]
    angles = tables(torch.arange(tokens, device=draw.device), head_size, decoder.ROPE_BASE)
    cos, sin = (draw.rounded(table, torch.float32) for table in angles)
    to_e5m2 = draw.scaling(scale) if fp8 else None
    unit = size_of(qkv)
    return [
        Pass("forward", lambda: function.forward(qkv, cos, sin, heads, kv_heads), 2 * unit),
        Pass(
            "backward",
            lambda: (function.backward(*gradients, cos, sin, half=half, fp8=to_e5m2, frozen_scales=frozen), to_e5m2),
            unit + unit * half + qkv.numel() * fp8,
        ),
    ]


SIZES = {
    "tokens": decoder.TOKENS,
    "heads": decoder.HEADS,
    "kv_heads": decoder.KV_HEADS,
    "head_size": decoder.HEAD_SIZE,
}

CASES = (
    Case(
        "Llama-2-70B",
        passes,
        {**SIZES, "half": True, "fp8": False},
        tests=[
            {"tokens": 37, "heads": 3, "kv_heads": 1, "head_size": 16},
            {"tokens": 5, "heads": 2, "kv_heads": 2, "head_size": 6},
            {"tokens": 70, "heads": 1, "kv_heads": 1, "head_size": 2},
        ],
        gpu={"tokens": 1003},
    ),
    Case(
        "Llama-2-70B to FP8",
        passes,
        {**SIZES, "half": False, "fp8": True},
        tests=[
            {"tokens": 70, "heads": 2, "kv_heads": 2, "head_size": 24},
            {"tokens": 70, "heads": 2, "kv_heads": 1, "head_size": 20},
            {"tokens": 40, "heads": 2, "kv_heads": 1, "head_size": 32, "half": True, "scale": 370.0},
            {"tokens": 40, "heads": 2, "kv_heads": 1, "head_size": 32, "scale": 370.0, "frozen": True},
        ],
        gpu={"tokens": 2048},
        dtypes=(torch.bfloat16,),
    ),
)
