"""Cases of the basis functions: the edges of a micro-batch with 16 structures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.oc20.ops.edge_basis.reference import spherical_constants
from common.ops.cases import Case, Draw, Pass, size_of


def passes(
    edge_basis: Callable[..., tuple[Tensor, Tensor, Tensor]],
    draw: Draw,
    edges: int,
    orders: int,
    radial: int,
    exponent: int,
) -> list[Pass]:
    """Make the passes of the functions and two derivatives by the distance. One distance is the cutoff."""
    x_E = draw.uniform(edges, low=0.1, high=1.0)
    x_E = torch.where(torch.arange(edges, device=draw.device) == 0, 1.0, x_E).requires_grad_()
    unit_E3 = draw.rounded(normalize(draw.normal(edges, 3)))
    constants = [each.to(draw.device) for each in spherical_constants(orders, radial)]
    gradients = draw.normal(edges).requires_grad_(), draw.normal(edges, orders, radial).requires_grad_()
    d_slope_E = draw.normal(edges)
    forward = size_of(x_E, unit_E3, *gradients) + edges * orders**2 * x_E.element_size()

    def basis() -> tuple[Tensor, Tensor, Tensor]:
        return edge_basis(x_E, unit_E3, *constants, exponent)

    def slope() -> Tensor:
        (slope_E,) = torch.autograd.grad(basis()[:2], x_E, gradients, create_graph=True)
        return slope_E

    return [
        Pass("forward", basis, forward),
        Pass("backward", slope, size_of(x_E, *gradients), after="forward"),
        Pass(
            "double backward", lambda: torch.autograd.grad(slope(), (x_E, *gradients), d_slope_E),
            2 * size_of(x_E, *gradients), after="backward",
        ),
    ]  # fmt: skip


CASES = (
    Case(
        "micro-batch of 16 structures",
        passes,
        {"edges": 47000, "orders": 7, "radial": 6, "exponent": 5},
        tests=[
            {"edges": 131, "orders": 4, "radial": 3},
            {"edges": 1, "orders": 3, "radial": 5, "exponent": 1},
            {"edges": 9, "orders": 2, "radial": 1, "exponent": 2},
        ],
        gpu={},
        dtypes=(torch.float32,),
    ),
)
