"""Cases of causal attention: a row, the second half of a row, and a product q | k | v of each head, read as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.causal_attention.reference import CausalAttention
from common.ops.sizes import decoder, gpt3

SCALE = 0.1
"""Of the scores; the default of the libraries, 1 / sqrt(head_size), would be a wrong one."""


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
    """Forward and backward; FLOP count pairs that the mask leaves.

    Args:
        spare: keys and values are the beginnings of rows that are longer by so many tokens.
        interleaved: they are views of one product, as the gradients of ``backward_into`` are.
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
