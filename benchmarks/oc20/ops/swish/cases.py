"""Cases of swish: the messages of a micro-batch with 16 structures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of


def passes(swish: Callable[[Tensor], Tensor], draw: Draw, edges: int, hidden: int) -> list[Pass]:
    """Make the passes of the function and its two derivatives."""
    x, dy, ddx = (draw.normal(edges, hidden, scale=3.0) for _ in range(3))
    x.requires_grad_()
    dy.requires_grad_()

    def gradient() -> Tensor:
        (dx,) = torch.autograd.grad(swish(x), x, dy, create_graph=True)
        return dx

    moved = size_of(x)
    return [
        Pass("forward", lambda: swish(x), 2 * moved),
        Pass("backward", gradient, 3 * moved, after="forward"),
        Pass(
            "double backward", lambda: torch.autograd.grad(gradient(), (dy, x), ddx), 5 * moved, after="backward"
        ),
    ]  # fmt: skip


CASES = (
    Case(
        "micro-batch of 16 structures",
        passes,
        {"edges": 47000, "hidden": 192},
        tests=[{"edges": 7, "hidden": 192}, {"edges": 1, "hidden": 1}],
        gpu={},
    ),
)
