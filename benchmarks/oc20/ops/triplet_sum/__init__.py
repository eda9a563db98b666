"""Sum over triplets k -> j -> i: messages of edges k -> j, weighted by distance and angle, into edges j -> i.

The sum of an edge j -> i with the direction u is

    sum_kj message[kj] sum_l Y_l0(angle(u, u_kj)) weight[kj, l]

over all edges k -> j but the reverse i -> j of the edge. By the addition theorem of spherical harmonics, Y_l0(angle) is
sum_m h_lm(u) h_lm(u_kj), where h_lm is Y_lm times the fourth root of 4 pi / (2l + 1). So the sum factors into moments
of the edges into each atom, sum_kj h_lm(u_kj) message[kj] weight[kj, l], and the work grows with edges, not with
triplets. The reverse edge is subtracted: it has the angle pi.

Shapes: N atoms, E edges, S orders l, M = S^2 functions h_lm with lm = l^2 + l + m, C channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels


class EdgeGraph(NamedTuple):
    """Directed edges, sorted by target; all tensors are int32.

    Attributes:
        source_E, target_E: the atoms of each edge.
        reverse_E: the edge of the opposite direction, or -1.
        into_N1: (N + 1,) the edges into atom n are those from into[n] to into[n + 1] - 1.
        by_source_E: the edges, sorted by source.
        from_N1: (N + 1,) positions in ``by_source_E``, as ``into_N1``.
    """

    source_E: Tensor
    target_E: Tensor
    reverse_E: Tensor
    into_N1: Tensor
    by_source_E: Tensor
    from_N1: Tensor


def edge_graph(source_E: Tensor, target_E: Tensor, reverse_E: Tensor, atoms: int) -> EdgeGraph:
    """Return the graph of ``atoms``. It is made on the device, and the host does not wait."""
    numbers_N1 = torch.arange(atoms + 1, dtype=target_E.dtype, device=target_E.device)
    sorted_E, order_E = source_E.sort(stable=True)
    into_N1, from_N1 = (torch.searchsorted(keys, numbers_N1, out_int32=True) for keys in (target_E, sorted_E))
    return EdgeGraph(source_E, target_E, reverse_E, into_N1, order_E.int(), from_N1)


def triplet_sum_reference(message_EC: Tensor, weight_ESC: Tensor, harmonics_EM: Tensor, graph: EdgeGraph) -> Tensor:
    """Return the sums, (E, C). Autograd has first and second derivatives by message, weight and harmonics.

    Args:
        weight_ESC: the part of the weight that depends on the distance.
        harmonics_EM: h_lm of the directions, :func:`benchmarks.oc20.ops.edge_basis.reference.spherical_harmonics`.
    """
    value_ESC, (_, orders, channels) = message_EC[:, None] * weight_ESC, weight_ESC.shape
    atoms, has_reverse_E1 = len(graph.into_N1) - 1, (graph.reverse_E >= 0)[:, None]
    opposite_ESC = value_ESC.index_select(0, graph.reverse_E.clamp(min=0)) * has_reverse_E1[:, None]
    sum_EC = torch.zeros_like(message_EC)
    for order in range(orders):
        opposite = (-1) ** order * math.sqrt((2 * order + 1) / (4 * math.pi))
        factor_EM1 = harmonics_EM[:, order**2 : (order + 1) ** 2, None]
        moments_NMC = value_ESC.new_zeros(atoms, 2 * order + 1, channels)
        moments_NMC = moments_NMC.index_add(0, graph.target_E, factor_EM1 * value_ESC[:, order, None])
        from_moments_EC = (factor_EM1 * moments_NMC.index_select(0, graph.source_E)).sum(1)
        sum_EC = sum_EC + from_moments_EC - opposite * opposite_ESC[:, order]
    return sum_EC


TRIPLET_SUM = Operation(
    "triplet_sum",
    triplet_sum_reference,
    {"triton": triton_kernels("benchmarks.oc20.ops.triplet_sum.triton:triplet_sum")},
    kernel_names=(("sum over triplets", r"^triplet_"),),
    cases="benchmarks.oc20.ops.triplet_sum.cases",
)
"""Implementations of :func:`triplet_sum_reference`. The reference has M C values per edge in memory."""
