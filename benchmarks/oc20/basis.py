"""Basis functions of distances and angles: those of DimeNet (Gasteiger et al., arXiv:2003.03123, equations 6 to 8).

With x = distance / cutoff and the envelope u:

* radial: u(x) sin(f_n x), with trained frequencies f_n, which start at n pi;
* spherical: u(x) c_ln j_l(z_ln x) Y_l0(angle). z_ln is the n-th positive zero of the spherical Bessel function j_l, and
  c_ln normalises j_l(z_ln x) on the unit ball.

All functions are sums and products, so autograd has their second derivatives.
Shapes: E edges, R radial functions, S orders of spherical functions.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn


def envelope(x: Tensor, exponent: int) -> Tensor:
    """Return 1/x + a x^(p-1) + b x^p + c x^(p+1) with p = exponent + 1; it and two derivatives are 0 at x = 1."""
    p = exponent + 1
    a, b, c = -(p + 1) * (p + 2) / 2, p * (p + 2), -p * (p + 1) / 2
    return 1 / x + x ** (p - 1) * (a + x * (b + c * x))


def spherical_bessel(x: Tensor, orders: int) -> list[Tensor]:
    """Return j_0(x) to j_(orders-1)(x), by upward recurrence from ``x`` > 0, fp64.

    The recurrence loses digits where x is far below the order: about six of sixteen at order 6 and x = 1.
    """
    functions = [torch.sin(x) / x]
    if orders > 1:
        functions.append((functions[0] - torch.cos(x)) / x)
    for order in range(2, orders):
        functions.append((2 * order - 1) / x * functions[-1] - functions[-2])
    return functions


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
        cutoff: distance in angstrom at which the functions are 0.
        exponent: see :func:`envelope`.
    """

    def __init__(self, count: int, cutoff: float, exponent: int) -> None:
        super().__init__()
        self._cutoff, self._exponent = cutoff, exponent
        self.frequencies = nn.Parameter(math.pi * torch.arange(1, count + 1, dtype=torch.float32))

    def forward(self, distance_E: Tensor) -> Tensor:
        """Return the functions of every edge, (E, R), in the dtype of the frequencies."""
        x_E1 = distance_E[:, None] / self._cutoff
        return envelope(x_E1, self._exponent) * torch.sin(self.frequencies * x_E1)


class SphericalBasis(nn.Module):
    """The part of the spherical basis that depends on the distance: u(x) c_ln j_l(z_ln x).

    :mod:`benchmarks.oc20.ops.triplet_sum` has the part that depends on the angle.

    Args:
        orders: S.
        count: R.
        cutoff, exponent: as for :class:`RadialBasis`.
    """

    zeros: Tensor
    factors: Tensor

    def __init__(self, orders: int, count: int, cutoff: float, exponent: int) -> None:
        super().__init__()
        self._orders, self._cutoff, self._exponent = orders, cutoff, exponent
        zeros_SR = spherical_bessel_zeros(orders, count)
        following = spherical_bessel(zeros_SR, orders + 1)
        factors = [(following[order + 1][order].square() / 2).rsqrt() for order in range(orders)]
        self.register_buffer("zeros", zeros_SR, persistent=False)
        self.register_buffer("factors", torch.stack(factors), persistent=False)

    def forward(self, distance_E: Tensor) -> Tensor:
        """Return the functions of every edge, (E, S, R). The arithmetic is fp64: small arguments lose digits."""
        x_E11 = distance_E.double()[:, None, None] / self._cutoff
        radial = [
            function[:, order] for order, function in enumerate(spherical_bessel(self.zeros * x_E11, self._orders))
        ]
        scaled_ESR = envelope(x_E11, self._exponent) * self.factors * torch.stack(radial, 1)
        return scaled_ESR.to(distance_E.dtype)
