# mypy: allow-untyped-defs
"""Triton kernels of the basis functions of an edge. One writes the functions of the distance and two derivatives.

With w = z x, j_l' = j_(l-1) - (l + 1) j_l / w, and j_l'' = -2 j_l' / w - (1 - l (l + 1) / w^2) j_l.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.oc20.ops.edge_basis.reference import envelope_factors
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous


@triton.jit
def edge_functions_kernel(
    x_ptr,  # (E,)
    zeros_ptr, factors_ptr,  # (S, R) fp64
    envelope_ptr,  # (3, E), written: the function and its derivatives
    radial_ptr,  # (3, E, S R), written
    a, b, c,
    E, R,
    S: tl.constexpr, EXPONENT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Write the functions of the distances of the program's edges. Grid (ceil(E / BLOCK_E),)."""
    edge = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    some = edge < E
    x = tl.load(x_ptr + edge, mask=some, other=1.0).to(tl.float64)
    inverse = 1.0 / x
    power = x
    for _ in tl.static_range(EXPONENT - 1):
        power *= x
    u = inverse + power * (a + x * (b + x * c))
    b, c = b * (EXPONENT + 1), c * (EXPONENT + 2)
    u1 = power * inverse * (a * EXPONENT + x * (b + x * c)) - inverse * inverse
    b, c = b * EXPONENT, c * (EXPONENT + 1)
    u2 = inverse * inverse * (2 * inverse + power * (a * (EXPONENT * (EXPONENT - 1)) + x * (b + x * c)))
    tl.store(envelope_ptr + edge, u, mask=some)
    tl.store(envelope_ptr + E + edge, u1, mask=some)
    tl.store(envelope_ptr + 2 * E + edge, u2, mask=some)

    function = tl.arange(0, BLOCK_F)
    known, order = function < S * R, function // R
    zero = tl.load(zeros_ptr + function, mask=known, other=1.0)[None, :]
    factor = tl.load(factors_ptr + function, mask=known, other=0.0)[None, :]
    w = zero * x[:, None]
    inverse_w = 1.0 / w
    before, j = tl.cos(w) * inverse_w, tl.sin(w) * inverse_w
    for up in tl.static_range(1, S):
        after = (2 * up - 1) * inverse_w * j - before
        higher = (order >= up)[None, :]
        before, j = tl.where(higher, j, before), tl.where(higher, after, j)
    degree = order[None, :].to(tl.float64)
    j1 = before - (degree + 1) * inverse_w * j
    j2 = (degree * (degree + 1) * inverse_w * inverse_w - 1) * j - 2 * inverse_w * j1
    j1, j2 = j1 * zero, j2 * (zero * zero)
    u, u1, u2 = u[:, None], u1[:, None], u2[:, None]
    at = radial_ptr + edge.to(tl.int64)[:, None] * (S * R) + function[None, :]
    both, derivative = some[:, None] & known[None, :], tl.full((), S, tl.int64) * R * E
    tl.store(at, factor * (u * j), mask=both)
    tl.store(at + derivative, factor * (u1 * j + u * j1), mask=both)
    tl.store(at + 2 * derivative, factor * (u2 * j + 2 * u1 * j1 + u * j2), mask=both)


@triton.jit
def edge_harmonics_kernel(
    unit_ptr,  # (E, 3)
    harmonics_ptr,  # (E, S^2), written
    E,
    S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the harmonics of the directions of the program's edges. Grid (ceil(E / BLOCK_E),)."""
    edge = (tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
    some = edge < E
    x = tl.load(unit_ptr + 3 * edge, mask=some, other=0.0).to(tl.float64)
    y = tl.load(unit_ptr + 3 * edge + 1, mask=some, other=0.0).to(tl.float64)
    z = tl.load(unit_ptr + 3 * edge + 2, mask=some, other=1.0).to(tl.float64)
    at = harmonics_ptr + edge * (S * S)
    real, imaginary = x * 0 + 1, x * 0
    start = x * 0 + 0.28209479177387814  # 1 / sqrt(4 pi)
    for m in tl.static_range(S):
        if m > 0:
            real, imaginary = x * real - y * imaginary, x * imaginary + y * real
            start *= ((2 * m + 1) / (2 * m)) ** 0.5
        before, polynomial = x * 0, start
        for up in tl.static_range(m + 1, S + 1):  # l = up - 1
            scaled = (12.566370614359172 / (2 * up - 1)) ** 0.25 * polynomial  # 4 pi / (2 l + 1)
            if m > 0:
                scaled *= 1.4142135623730951
                tl.store(at + ((up - 1) * up - m), scaled * imaginary, mask=some)
            tl.store(at + ((up - 1) * up + m), scaled * real, mask=some)
            after = ((4 * up * up - 1) / (up * up - m * m)) ** 0.5 * z * polynomial
            if up - 1 > m:
                after -= (
                    ((4 * up * up - 1) / (up * up - m * m)) ** 0.5
                    * (((up - 1) * (up - 1) - m * m) / (4 * (up - 1) * (up - 1) - 1)) ** 0.5
                    * before
                )
            before, polynomial = polynomial, after


TILES: dict[str, Tile] = {"functions": Tile(edges=8, warps=4), "harmonics": Tile(edges=128, warps=4)}
"""Tiles by kernel; ``edges``: edges of a program."""


class _Known(torch.autograd.Function):
    """A function of x whose values and derivatives at every x are known."""

    @staticmethod
    def forward(ctx: Any, x_E: Tensor, value: Tensor, *derivatives: Tensor) -> Tensor:
        ctx.save_for_backward(x_E, *derivatives)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_E, *derivatives = ctx.saved_tensors
        if not derivatives:
            raise NotImplementedError("the functions of the distance have two derivatives")
        slope = _Known.apply(x_E, *derivatives)
        return (gradients[0] * slope).reshape(len(x_E), -1).sum(1), None, *(None for _ in derivatives)


def edge_basis(
    x_E: Tensor, unit_E3: Tensor, zeros_SR: Tensor, factors_SR: Tensor, exponent: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the envelope (E,), the radial parts (E, S, R) and the harmonics (E, M), with two derivatives by ``x_E``.

    See :func:`benchmarks.oc20.ops.edge_basis.reference.edge_basis_reference`.

    Raises:
        ValueError: a tensor is not contiguous, or the directions need a gradient.
    """
    if unit_E3.requires_grad:
        raise ValueError("the kernels have no derivative by directions; detach them or choose the reference")
    require_contiguous(x=x_E, unit=unit_E3, zeros=zeros_SR, factors=factors_SR)
    edges, (orders, radial), tile = len(x_E), zeros_SR.shape, TILES["functions"]
    envelope_3E, radial_3ESR = x_E.new_empty(3, edges), x_E.new_empty(3, edges, orders, radial)
    edge_functions_kernel[(triton.cdiv(edges, tile.edges),)](
        x_E.detach(), zeros_SR, factors_SR, envelope_3E, radial_3ESR, *envelope_factors(exponent), edges, radial,
        S=orders, EXPONENT=exponent, BLOCK_E=tile.edges, BLOCK_F=triton.next_power_of_2(orders * radial),
        num_warps=tile.warps,
    )  # fmt: skip
    harmonics_EM, tile = x_E.new_empty(edges, orders**2), TILES["harmonics"]
    edge_harmonics_kernel[(triton.cdiv(edges, tile.edges),)](
        unit_E3, harmonics_EM, edges, S=orders, BLOCK_E=tile.edges, num_warps=tile.warps
    )
    envelope_E: Tensor = _Known.apply(x_E, *envelope_3E)
    radial_ESR: Tensor = _Known.apply(x_E, *radial_3ESR)
    return envelope_E, radial_ESR, harmonics_EM
