"""Cases of the residual additions: after the triangle multiplications, and after the row attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from benchmarks.openfold.ops.dropout_add import SharedDropout
from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import folding as size


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    x: int,
    y: int,
    features: int,
    p: float,
    gate: bool,
    shared: Literal["rows", "columns"] = "rows",
    first: int = 0,
    whole: int = 0,
) -> list[Pass]:
    """Make both passes; ``first`` and ``whole`` are those of :class:`SharedDropout`."""
    residual, update, dy = (draw.normal(samples, x, y, features) for _ in range(3))
    logits = draw.normal(samples, x, y, features) if gate else None
    dropout = SharedDropout(p, draw.seed(), 41, shared, first, whole)
    inputs = [each for each in (residual, update, logits) if each is not None]
    read = size_of(update, logits) if gate else 0.0
    return both_ways(
        lambda: function(residual, update, logits, dropout), inputs, [dy],
        moved=(size_of(*inputs, dy), read + size_of(dy) + size_of(*inputs[1:])),
    )  # fmt: skip


CASES = (
    Case(
        "triangle multiplication",
        passes,
        {"samples": 1, "x": size.RESIDUES, "y": size.RESIDUES, "features": size.PAIR, "p": 0.25, "gate": True},
        tests=[
            {"samples": 2, "x": 3, "y": 17, "features": 64},
            {"samples": 2, "x": 5, "y": 9, "features": 50, "shared": "columns", "first": 10, "whole": 20},
            {"x": 2, "y": 4, "features": 7, "first": 4, "whole": 12},
            {"x": 2, "y": 4, "features": 8, "p": 0.0},
        ],
        gpu={"x": 101},
        dtypes=size.DTYPES,
    ),
    Case(
        "row attention",
        passes,
        {"samples": 1, "x": size.CLUSTERS, "y": size.RESIDUES, "features": size.MSA, "p": 0.15, "gate": False},
        tests=[{"samples": 3, "x": 4, "y": 5, "features": 16}],
        dtypes=size.DTYPES,
    ),
)
