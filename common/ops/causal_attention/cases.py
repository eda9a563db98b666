"""Cases of causal attention: a whole row, the second half of a row, and the QKV product with q, k and v interleaved."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.causal_attention.reference import CausalAttention
from common.ops.sizes import decoder, gpt3

SCALE = 0.1
"""Scale of the scores. It differs from the default of the libraries, 1 / sqrt(head_size)."""


def passes(
    function: CausalAttention,
    draw: Draw,
    rows: int,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    spare: int = 0,
    interleaved: bool = False,
) -> list[Pass]:
    """Make the forward and backward passes. FLOPs count only pairs that the mask keeps.

    Args:
        spare: unused tokens after the keys and values of each row.
        interleaved: whether queries, keys and values are views of one tensor. A further pass then calls
            ``backward_into``, whose gradients are views of one tensor, too.
    """
    if interleaved:
        qkv = draw.normal(rows, queries, heads, 3, head_size)
        q, k, v = qkv.unbind(3)
    else:
        q = draw.normal(rows, queries, heads, head_size)
        k, v = (draw.normal(rows, keys + spare, kv_heads, head_size)[:, :keys] for _ in range(2))
    do = draw.normal(rows, queries, heads, head_size)

    def forward() -> tuple[Tensor, bool, Tensor]:
        o, saved = function.forward(q, k, v, SCALE)
        return o, o.is_contiguous(), saved.lse

    def backward() -> tuple[Tensor, ...]:
        _, saved = function.forward(q, k, v, SCALE)
        return function.backward(do, saved)

    product = 2.0 * rows * heads * head_size * queries * (keys - queries / 2)
    moved = 2 * size_of(q, k)
    found = [
        Pass("forward", forward, moved, 2 * product),
        Pass("backward", backward, 2 * moved, 5 * product, after="forward"),
    ]
    if not interleaved:
        return found
    dq, dk, dv = torch.full_like(qkv, float("nan")).unbind(3)

    def backward_into() -> tuple[Tensor, ...]:
        _, saved = function.forward(q, k, v, SCALE)
        function.backward_into(do, saved, (dq, dk, dv))
        return dq, dk, dv

    return [*found, Pass("backward in place", backward_into, 2 * moved, 5 * product, after="forward")]


HALF = (torch.float16, torch.bfloat16)
LLAMA = {
    "rows": 1,
    "queries": decoder.TOKENS,
    "keys": decoder.TOKENS,
    "heads": decoder.HEADS,
    "kv_heads": decoder.KV_HEADS,
    "head_size": decoder.HEAD_SIZE,
}
GPT3 = {
    "rows": gpt3.ROWS,
    "queries": gpt3.LENGTH,
    "keys": gpt3.LENGTH,
    "heads": gpt3.HEADS // gpt3.RANKS[0],
    "kv_heads": gpt3.HEADS // gpt3.RANKS[0],
    "head_size": gpt3.HEAD_SIZE,
    "interleaved": True,
}
FEW = {"rows": 2, "heads": 16, "spare": 64}

CASES = (
    Case(
        "Llama-2-70B",
        passes,
        LLAMA,
        tests=[
            {**FEW, "queries": 1024, "keys": 1024, "kv_heads": 2},
            {**FEW, "queries": 512, "keys": 512, "kv_heads": 16, "head_size": 64},
            {**FEW, "queries": 200, "keys": 200, "kv_heads": 1},
        ],
        dtypes=HALF,
        tolerance=2.0,
    ),
    Case(
        "Llama-2-70B half of a row",
        passes,
        {**LLAMA, "queries": decoder.TOKENS // 2},
        tests=[
            {**FEW, "queries": 512, "keys": 2048, "kv_heads": 2},
            {**FEW, "queries": 320, "keys": 1000, "kv_heads": 4},
        ],
        dtypes=HALF,
        tolerance=2.0,
    ),
    Case("GPT-3 interleaved", passes, GPT3, tests=[{"queries": 512, "keys": 512}], dtypes=HALF, tolerance=2.0),
)
