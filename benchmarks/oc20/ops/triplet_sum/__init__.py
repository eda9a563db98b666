"""Sum over triplets k -> j -> i: messages of edges k -> j, weighted by the spherical basis, into edges j -> i.

The weight of a triplet is W2 W1 s, where s is the product of the basis of the edge k -> j and the spherical harmonics
of the angle between the edges. The reference has tensors of all triplets in memory.

Shapes: E edges, T triplets, S orders of the basis, R radial functions, B channels between both weights, C channels of a
message.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.ops.operation import Operation


def spherical_harmonics(cosine_T: Tensor, orders: int) -> Tensor:
    """Return Y_l0 of an angle, (T, S): sqrt((2l + 1) / (4 pi)) times the Legendre polynomial of its cosine."""
    legendre = [torch.ones_like(cosine_T), cosine_T]
    for order in range(2, orders):
        legendre.append(((2 * order - 1) * cosine_T * legendre[-1] - (order - 1) * legendre[-2]) / order)
    scaled = [math.sqrt((2 * order + 1) / (4 * math.pi)) * legendre[order] for order in range(orders)]
    return torch.stack(scaled, 1)


def triplet_sum_reference(
    message_EC: Tensor,
    basis_ESR: Tensor,
    unit_E3: Tensor,
    first_BF: Tensor,
    second_CB: Tensor,
    kj_T: Tensor,
    ji_T: Tensor,
) -> Tensor:
    """Return the sums, (E, C). Autograd has first and second derivatives by all inputs but the indices.

    Args:
        basis_ESR: the part of the spherical basis that depends on the length of an edge.
        unit_E3: directions of the edges, of length 1.
        first_BF: W1, with F = S R.
        second_CB: W2.
        kj_T, ji_T: edges k -> j and j -> i of the triplets, int32; the second ones ascend.
    """
    cosine_T = (unit_E3.index_select(0, ji_T) * unit_E3.index_select(0, kj_T)).sum(1)
    harmonics_TS1 = spherical_harmonics(cosine_T, basis_ESR.shape[1])[:, :, None]
    basis_TF = (basis_ESR.index_select(0, kj_T) * harmonics_TS1).flatten(1)
    weighted_TC = message_EC.index_select(0, kj_T) * (basis_TF @ first_BF.T @ second_CB.T)
    return torch.zeros_like(message_EC).index_add(0, ji_T, weighted_TC)


TRIPLET_SUM = Operation("triplet_sum", triplet_sum_reference)
"""Implementations of :func:`triplet_sum_reference`."""
