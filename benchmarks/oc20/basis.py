"""Basis functions of distances and angles: those of DimeNet (Gasteiger et al., arXiv:2003.03123, equations 6 to 8).

With x = distance / cutoff and the envelope u:

* radial: u(x) sin(f_n x), with trained frequencies f_n, which start at n pi;
* spherical: u(x) c_ln j_l(z_ln x) Y_l0(angle). z_ln is the n-th positive zero of the spherical Bessel function j_l, and
  c_ln normalises j_l(z_ln x) on the unit ball. :mod:`benchmarks.oc20.ops.triplet_sum` has the part of the angle.

All functions have two derivatives by the distance and the frequencies.
Shapes: E edges, R radial functions, S orders l, M = S^2 spherical harmonics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.oc20.ops.edge_basis import edge_basis_reference, spherical_bessel


def spherical_bessel_zeros(orders: int, count: int) -> Tensor:
    """Return the first ``count`` positive zeros of j_0 to j_(orders-1), (orders, count) fp64.

    The zeros of j_0 are n pi. Each zero of j_l lies between two adjacent zeros of j_(l-1), where bisection finds it.
    """
    zeros = math.pi * torch.arange(1, count + orders, dtype=torch.float64)
    rows = [zeros[:count]]
    for order in range(1, orders):
        low, high = (torch.stack(ends) for ends in zip(*pairwise(zeros), strict=True))
        sign = spherical_bessel(low, order + 1)[order].sign()
        for _ in range(64):
            middle = (low + high) / 2
            before = spherical_bessel(middle, order + 1)[order].sign() == sign
            low, high = torch.where(before, middle, low), torch.where(before, high, middle)
        zeros = (low + high) / 2
        rows.append(zeros[:count])
    return torch.stack(rows)


class RadialBasis(nn.Module):
    """The radial basis of a distance.

    Args:
        count: R.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(math.pi * torch.arange(1, count + 1, dtype=torch.float32))

    def forward(self, x_E: Tensor, envelope_E: Tensor) -> Tensor:
        """Return the functions of every edge, (E, R), in the dtype of the frequencies."""
        return envelope_E[:, None] * torch.sin(self.frequencies * x_E[:, None])


class SphericalBasis(nn.Module):
    """The envelope, the part of the spherical basis that depends on the distance, and spherical harmonics.

    Args:
        orders: S.
        count: R.
        exponent: see :func:`benchmarks.oc20.ops.edge_basis.envelope`.
        functions: implementation of :func:`benchmarks.oc20.ops.edge_basis.edge_basis_reference`.
    """

    zeros: Tensor
    factors: Tensor

    def __init__(
        self,
        orders: int,
        count: int,
        exponent: int,
        functions: Callable[..., tuple[Tensor, Tensor, Tensor]] = edge_basis_reference,
    ) -> None:
        super().__init__()
        self._exponent, self._functions = exponent, functions
        zeros_SR = spherical_bessel_zeros(orders, count)
        following = spherical_bessel(zeros_SR, orders + 1)
        factors = [(following[order + 1][order].square() / 2).rsqrt() for order in range(orders)]
        self.register_buffer("zeros", zeros_SR, persistent=False)
        self.register_buffer("factors", torch.stack(factors), persistent=False)

    def forward(self, x_E: Tensor, unit_E3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the functions of every edge, (E,), (E, S, R) and (E, M), in the dtype of ``x_E``.

        See :mod:`benchmarks.oc20.ops.edge_basis`.
        """
        return self._functions(x_E, unit_E3, self.zeros, self.factors, self._exponent)
