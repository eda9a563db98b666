"""Cases of the linear layers of an encoder layer, without biases. FP8 products include their casts.

FP8 has errors of some percent, so the tests can only show that the right operands are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.linear import Product
from common.ops.sizes import transformer as size


def passes(build: Callable[..., Product], draw: Draw, tokens: int, columns: int, rows: int) -> list[Pass]:
    """Make the forward and backward passes of a layer from (tokens, columns) to (tokens, rows)."""
    x, weight = draw.normal(tokens, columns), draw.normal(rows, columns, scale=0.02)
    dy = draw.normal(tokens, rows, scale=1e-3)
    product = build(weight.requires_grad_())
    given, own, taken = size_of(x), size_of(weight), size_of(dy)
    flops = 2.0 * tokens * columns * rows
    return both_ways(
        lambda: product(x, weight, None),
        [x, weight],
        [dy],
        moved=(given + own + taken, 2 * given + 2 * own + taken),
        flops=(flops, 2 * flops),
    )


CASES = tuple(
    Case(
        f"BERT-large {name}",
        passes,
        {"tokens": size.PACKS * size.LENGTH, "columns": columns, "rows": rows},
        tests=[{"tokens": 80, "columns": 48, "rows": 112}] if name == "QKV" else [],
        gpu={"tokens": 1024},
        dtypes=(torch.bfloat16,),
        tolerance=5.0,
    )
    for name, (columns, rows) in size.LINEAR.items()
)
