"""Cases of gated attention: rows and columns of the alignment, triangles of pairs, templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.sizes import folding as size


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    samples: int,
    rows: int,
    positions: int,
    heads: int,
    head_size: int,
    bias: bool = True,
    transposed: bool = False,
) -> list[Pass]:
    """Make both passes. A fifth of the keys are masked, but never the first one.

    Args:
        bias: whether rows share a bias, which then has a gradient.
        transposed: whether rows are columns in memory, and the bias is transposed.
    """
    axes = (positions, rows) if transposed else (rows, positions)
    qkvg = draw.normal(samples, *axes, 4, heads, head_size).requires_grad_()
    gate_bias = draw.normal(heads, head_size).requires_grad_()
    exists = (draw.integers(0, 5, samples, rows, positions) > 0) | (torch.arange(positions, device=draw.device) == 0)
    pair = draw.normal(samples, heads, positions, positions).requires_grad_() if bias else None
    dy = draw.normal(samples, *axes, heads, head_size)

    def forward() -> Tensor:
        if not transposed:
            return function(qkvg, gate_bias, exists, pair)
        shared = None if pair is None else pair.transpose(2, 3)
        return function(qkvg.transpose(1, 2), gate_bias, exists, shared).transpose(1, 2)

    def result() -> tuple[Tensor, bool]:
        context = forward()
        return context, context.is_contiguous()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), [each for each in (qkvg, gate_bias, pair) if each is not None], dy)

    product = 2.0 * samples * rows * heads * head_size * positions**2
    return [
        Pass("forward", result, size_of(qkvg, pair, dy), 2 * product),
        Pass("backward", backward, 2 * size_of(qkvg, pair, dy), 5 * product, after="forward"),
    ]


def case(name: str, samples: int, rows: int, positions: int, heads: int, head_size: int, **options: Any) -> Case:
    """Return a case of a recipe's sizes; ``options`` are those of :func:`passes`, and tests."""
    tests, gpu = options.pop("tests", ()), options.pop("gpu", None)
    recipe = {"samples": samples, "rows": rows, "positions": positions, "heads": heads, "head_size": head_size}
    return Case(name, passes, {**recipe, **options}, tests=tests, gpu=gpu, dtypes=size.DTYPES)


SMALL = {"samples": 2, "rows": 2, "positions": 37, "heads": 2}
CASES = (
    case(
        "rows of the alignment", 1, size.CLUSTERS, size.RESIDUES, 8, 32,
        tests=[{**SMALL, "head_size": 16}, {"samples": 1, "rows": 9, "positions": 70, "heads": 1, "head_size": 5}],
        gpu={"rows": 30, "positions": 333},
    ),
    case(
        "rows of the extra sequences", 1, size.SEQUENCES, size.RESIDUES, 8, 8,
        tests=[{**SMALL, "samples": 1}], gpu={"rows": 60},
    ),
    case(
        "columns of the alignment", 1, size.RESIDUES, size.CLUSTERS, 8, 32, bias=False, transposed=True,
        tests=[{**SMALL, "positions": 5}, {**SMALL, "samples": 1, "transposed": False}], gpu={"rows": 60},
    ),
    case("triangles, starting node", 1, size.RESIDUES, size.RESIDUES, 4, 32, gpu={"rows": 60}),
    case(
        "triangles, ending node", 1, size.RESIDUES, size.RESIDUES, 4, 32, transposed=True,
        tests=[{**SMALL, "samples": 1}], gpu={"rows": 60},
    ),
    case("triangles of the templates", size.TEMPLATES, size.RESIDUES, size.RESIDUES, 4, 16, gpu={"rows": 60}),
)  # fmt: skip
