"""Cases of the input of a LoRA adapter: dropout of x, dropout of a norm's result, and the backward pass."""

from __future__ import annotations

import torch

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.dropout.reference import DropoutMask
from common.ops.lora_input import LoraInput, Region
from common.ops.sizes import decoder, transformer

MOST_ROWS = 1 << 18
"""Largest number of rows of the whole tensor, because indices of its elements have 32 bits."""


def passes(
    function: LoraInput,
    draw: Draw,
    tokens: int,
    columns: int,
    rank: int,
    p: float,
    columns_total: int = 0,
    column_offset: int = 0,
) -> list[Pass]:
    """Make the passes of all functions.

    Args:
        p: dropout probability.
        columns_total: columns of the whole tensor, of which x is a part; 0 if x is the whole tensor.
        column_offset: first column of x in the whole tensor.
    """
    x, dx = (draw.normal(tokens, columns) for _ in range(2))
    weight, du, a = draw.normal(columns), draw.normal(tokens, rank), draw.normal(rank, columns)
    inverse_rms = draw.uniform(tokens, low=0.5, high=2.0, dtype=torch.float32)
    mask = DropoutMask(p, draw.seed(), transformer.SITE)
    region = Region()
    if columns_total:
        region = Region(draw.integers(0, MOST_ROWS, tokens), columns_total, column_offset)
    moved = 2 * size_of(x)
    return [
        Pass("forward", lambda: function.dropped(x, mask, region), moved),
        Pass("of a norm", lambda: function.dropped_norm(x, inverse_rms, weight, mask, region), moved),
        Pass(
            "backward",
            lambda: (function.add_input_gradient(dx, du, a, mask, region), dx),
            moved,
            2.0 * tokens * columns * rank,
        ),
    ]


CASES = (
    Case(
        "Llama-2-70B",
        passes,
        {
            "tokens": decoder.TOKENS,
            "columns": decoder.HIDDEN,
            "rank": decoder.RANK,
            "p": transformer.PROBABILITY,
        },
        tests=[
            {"tokens": 9, "columns": 1100},
            {"tokens": 9, "columns": 1},
            {"tokens": 70, "columns": 200, "columns_total": 1000, "column_offset": 64},
            {"tokens": 9, "columns": 1100, "columns_total": 2999, "column_offset": 33, "rank": 3},
            {"tokens": 9, "columns": 7, "rank": 3, "p": 0.0},
        ],
        gpu={"tokens": 1003, "columns_total": 2 * decoder.HIDDEN, "column_offset": decoder.HIDDEN},
    ),
)
