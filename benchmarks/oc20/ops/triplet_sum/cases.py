"""Cases of the sum over triplets: the graph of a micro-batch with 16 structures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.oc20.ops.edge_basis.reference import spherical_harmonics
from benchmarks.oc20.ops.triplet_sum import EdgeGraph, edge_graph
from common.ops.cases import Case, Draw, Pass, size_of


def random_edges(draw: Draw, atoms: int, pairs: int, single: int) -> tuple[EdgeGraph, Tensor]:
    """Return a graph of random edges and their directions (E, 3).

    Args:
        atoms: number of atoms; the last one has no edge.
        pairs: edges that have a reverse edge, divided by 2.
        single: edges without a reverse edge.
    """
    first, second = (draw.integers(0, atoms - 1, pairs + single, dtype=torch.int32) for _ in range(2))
    unit = normalize(draw.normal(pairs + single, 3, dtype=torch.float32).double())
    source, target = torch.cat([first, second[:pairs]]), torch.cat([second, first[:pairs]])
    numbers = torch.arange(len(source), device=draw.device)
    reverse = torch.cat([numbers[pairs + single :], numbers.new_full((single,), -1), numbers[:pairs]])
    order = target.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = numbers
    reverse = torch.where(reverse < 0, reverse, position[reverse])[order].int()
    unit_E3 = draw.rounded(torch.cat([unit, -unit[:pairs]])[order], torch.float32)
    return edge_graph(source[order], target[order], reverse, atoms), unit_E3


def passes(
    triplet_sum: Callable[..., Tensor], draw: Draw, atoms: int, pairs: int, single: int, orders: int, channels: int
) -> list[Pass]:
    """Make the passes of a sum and its two derivatives."""
    graph, unit_E3 = random_edges(draw, atoms, pairs, single)
    harmonics_EM = spherical_harmonics(unit_E3, orders)
    messages = [draw.normal(len(unit_E3), channels) for _ in range(3)]
    weights = [draw.normal(len(unit_E3), orders, channels) for _ in range(2)]
    message_EC, d_sum_EC, weight_ESC = (each.requires_grad_() for each in (*messages[:2], weights[0]))
    forward = size_of(harmonics_EM, message_EC, weight_ESC, d_sum_EC)

    def gradients() -> tuple[Tensor, ...]:
        sum_EC = triplet_sum(message_EC, weight_ESC, harmonics_EM, graph)
        return torch.autograd.grad(sum_EC, (message_EC, weight_ESC), d_sum_EC, create_graph=True)

    def second() -> tuple[Tensor, ...]:
        inputs = message_EC, weight_ESC, d_sum_EC
        return torch.autograd.grad(gradients(), inputs, (messages[2], weights[1]))

    return [
        Pass("forward", lambda: triplet_sum(message_EC, weight_ESC, harmonics_EM, graph), forward),
        Pass("backward", gradients, forward + size_of(message_EC, weight_ESC), after="forward"),
        Pass("double backward", second, 2 * forward + 2 * size_of(message_EC, weight_ESC), after="backward"),
    ]


CASES = (
    Case(
        "micro-batch of 16 structures",
        passes,
        {"atoms": 1200, "pairs": 22000, "single": 3000, "orders": 7, "channels": 64},
        tests=[
            {"atoms": 3, "pairs": 20, "single": 5, "orders": 3, "channels": 20},  # over 16 edges on a side of an atom
            {"atoms": 9, "pairs": 3, "single": 1, "orders": 2, "channels": 5},  # atoms without edges
            {"atoms": 2, "pairs": 9, "single": 0, "orders": 2, "channels": 33},  # an atom and its images
        ],
        gpu={},
        dtypes=(torch.float32,),
    ),
)
