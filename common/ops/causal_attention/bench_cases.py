"""Dense causal attention of a row, of the second half of a row to the whole, and of rows whose queries, keys and values
lie side by side head by head."""

from __future__ import annotations

import functools

import torch

from common.ops import causal_attention
from common.ops.bench import decoder as size
from common.ops.bench import gpt3
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.bench.transformer import normal, size_of
from common.ops.causal_attention.reference import CausalAttention


def case(function: CausalAttention, batch: int, dtype: torch.dtype, *, queries: int) -> list[Pass]:
    """The last ``queries`` of a row. FLOP count pairs that the mask leaves: half of a square."""
    q, do = (normal(dtype, 1, queries, size.HEADS, size.HEAD_SIZE) for _ in range(2))
    k, v = (normal(dtype, 1, size.TOKENS, size.KV_HEADS, size.HEAD_SIZE) for _ in range(2))
    scale = size.HEAD_SIZE**-0.5
    pairs = queries * (size.TOKENS - queries / 2)
    product = 2.0 * size.HEADS * size.HEAD_SIZE * pairs
    moved = 2 * size_of(q) + 2 * size_of(k)

    def both() -> None:
        _, saved = function.forward(q, k, v, scale)
        function.backward(do, saved)

    return [
        Pass("forward", lambda: function.forward(q, k, v, scale), moved, 2 * product),
        Pass("backward", both, 2 * moved, 5 * product, after="forward"),
    ]


def interleaved_case(function: CausalAttention, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Of GPT-3's rows on a rank of four: views of one product, whose gradients are written into one."""
    shape = gpt3.ROWS, gpt3.LENGTH, gpt3.HEADS // gpt3.RANKS[0], 3, gpt3.HEAD_SIZE
    qkv, do = normal(dtype, *shape), normal(dtype, *shape[:3], shape[4])
    q, k, v = qkv.unbind(3)
    dq, dk, dv = torch.empty_like(qkv).unbind(3)
    scale = gpt3.HEAD_SIZE**-0.5
    product = 2.0 * do.numel() * gpt3.LENGTH / 2
    moved = size_of(qkv) + size_of(do)

    def both() -> None:
        _, saved = function.forward(q, k, v, scale)
        function.backward(do, saved)

    def both_into() -> None:
        _, saved = function.forward(q, k, v, scale)
        function.backward_into(do, saved, (dq, dk, dv))

    return [
        Pass("forward", lambda: function.forward(q, k, v, scale), moved, 2 * product),
        Pass("backward", both, 2 * moved, 5 * product, after="forward"),
        Pass("backward in place", both_into, 2 * moved, 5 * product, after="forward"),
    ]


def entries() -> list[Entry]:
    """Every implementation."""
    sizes = {"head_size": size.HEAD_SIZE}
    name = "causal_attention interleaved"
    interleaved = each(name, causal_attention.CAUSAL_ATTENTION, "cudnn", sizes, interleaved_case, calls=0)
    return interleaved + [
        entry
        for name, queries in (("causal_attention", size.TOKENS), ("causal_attention half", size.TOKENS // 2))
        for entry in each(
            name, causal_attention.CAUSAL_ATTENTION, "cudnn", sizes, functools.partial(case, queries=queries), calls=0
        )
    ]


def sweeps() -> dict[str, Sweep]:
    """The libraries' tiles are their own."""
    return {}
