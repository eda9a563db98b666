"""Basis functions of an edge, those of DimeNet (Gasteiger et al., arXiv:2003.03123, equations 6 to 8), in PyTorch.

* The envelope u(x) and the radial parts u(x) c_ln j_l(z_ln x) of the spherical basis, with x = distance / cutoff. z_ln
  is the n-th positive zero of the spherical Bessel function j_l, and c_ln normalises j_l(z_ln x) on the unit ball. The
  arithmetic is fp64, because the Bessel functions of small arguments lose digits.
* The spherical harmonics h_lm(u) of the direction u. :mod:`benchmarks.oc20.ops.triplet_sum` makes angles of them.

Shapes: E edges, S orders l, R radial functions n, M = S^2 harmonics with lm = l^2 + l + m.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor


def envelope_factors(exponent: int) -> tuple[float, float, float]:
    """Return the factors a, b, c of :func:`envelope`."""
    p = exponent + 1
    return -(p + 1) * (p + 2) / 2, float(p * (p + 2)), -p * (p + 1) / 2


def envelope(x: Tensor, exponent: int) -> Tensor:
    """Return 1/x + a x^(p-1) + b x^p + c x^(p+1) with p = exponent + 1; it and two derivatives are 0 at x = 1."""
    a, b, c = envelope_factors(exponent)
    return 1 / x + x**exponent * (a + x * (b + c * x))


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


def spherical_constants(orders: int, count: int) -> tuple[Tensor, Tensor]:
    """Return z_ln and c_ln, (orders, count) fp64."""
    zeros_SR = spherical_bessel_zeros(orders, count)
    following = spherical_bessel(zeros_SR, orders + 1)
    factors = [(following[order + 1][order].square() / 2).rsqrt() for order in range(orders)]
    return zeros_SR, torch.stack(factors)


def spherical_harmonics(unit_E3: Tensor, orders: int) -> Tensor:
    """Return h_lm of directions, (E, M).

    h_lm is the real, orthonormal spherical harmonic Y_lm, times the fourth root of 4 pi / (2l + 1). So the sum over m
    of h_lm(u) h_lm(v) is Y_l0 of the angle between u and v: sqrt((2l + 1) / (4 pi)) times the Legendre polynomial of
    its cosine. With polynomials p_lm of z, Y_l0 is p_l0. For m > 0, Y_lm and Y_l(-m) are sqrt(2) p_lm times the real
    and the imaginary part of (x + iy)^m. The recurrence of p_lm is that of normalised associated Legendre functions.
    """
    x_E, y_E, z_E = unit_E3.unbind(1)
    real_E, imaginary_E = torch.ones_like(x_E), torch.zeros_like(x_E)
    start, found = math.sqrt(1 / (4 * math.pi)), {}
    for m in range(orders):
        if m:
            real_E, imaginary_E = x_E * real_E - y_E * imaginary_E, x_E * imaginary_E + y_E * real_E
            start *= math.sqrt((2 * m + 1) / (2 * m))
        before_E, polynomial_E = torch.zeros_like(z_E), torch.full_like(z_E, start)
        for order in range(m, orders):
            scale = (4 * math.pi / (2 * order + 1)) ** 0.25 * (math.sqrt(2) if m else 1)
            found[order, m] = scale * polynomial_E * real_E
            if m:
                found[order, -m] = scale * polynomial_E * imaginary_E
            factor = math.sqrt((4 * (order + 1) ** 2 - 1) / ((order + 1) ** 2 - m**2))
            back = factor * math.sqrt((order**2 - m**2) / (4 * order**2 - 1)) if order > m else 0.0
            before_E, polynomial_E = polynomial_E, factor * z_E * polynomial_E - back * before_E
    return torch.stack([found[lm] for lm in sorted(found)], 1)


def edge_basis_reference(
    x_E: Tensor, unit_E3: Tensor, zeros_SR: Tensor, factors_SR: Tensor, exponent: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the envelope (E,), the radial parts (E, S, R) and the harmonics (E, M), in the dtype of ``x_E``.

    Autograd has first and second derivatives by ``x_E`` and ``unit_E3``.

    Args:
        unit_E3: directions of the edges, of length 1.
        zeros_SR, factors_SR: see :func:`spherical_constants`.
        exponent: see :func:`envelope`.
    """
    x_E1 = x_E.double()[:, None]
    envelope_E1 = envelope(x_E1, exponent)
    bessel = [spherical_bessel(zeros_R * x_E1, order + 1)[order] for order, zeros_R in enumerate(zeros_SR)]
    radial_ESR = envelope_E1[:, None] * factors_SR * torch.stack(bessel, 1)
    harmonics_EM = spherical_harmonics(unit_E3, len(zeros_SR))
    return envelope_E1[:, 0].to(x_E.dtype), radial_ESR.to(x_E.dtype), harmonics_EM
