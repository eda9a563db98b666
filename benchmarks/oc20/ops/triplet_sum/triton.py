# mypy: allow-untyped-defs
"""Triton kernels of the sum over triplets and of its gradient, without atomics.

The sum is linear in message and weight. So its gradient has the same structure, with the edges on both sides of an atom
exchanged, and the gradient of that consists of one sum and one gradient. A sum of two terms takes one pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.oc20.ops.triplet_sum import EdgeGraph
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous


@triton.jit
def _product(message_ptr, weight_ptr, edge, order, channel, mask, C, S: tl.constexpr):
    """Return the product of message and weight of one order, (edges, channels)."""
    message = tl.load(message_ptr + edge[:, None] * C + channel[None, :], mask=mask, other=0.0)
    row = (edge * S + order) * C
    return message * tl.load(weight_ptr + row[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _harmonics(harmonics_ptr, edge, order, some, S: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the harmonics of one order, (edges, BLOCK_M), and 0 behind them."""
    index = tl.arange(0, BLOCK_M)
    mask = some[:, None] & (index < 2 * order + 1)[None, :]
    at = (edge * (S * S) + order * order)[:, None] + index[None, :]
    return tl.load(harmonics_ptr + at, mask=mask, other=0.0)


@triton.jit
def triplet_moments_kernel(
    message_ptr, weight_ptr,  # (E, C), (E, S, C): the first term
    more_message_ptr, more_weight_ptr,  # the second one
    harmonics_ptr,  # (E, S^2)
    rows_ptr, edges_ptr,  # (N + 1,), (E,)
    moments_ptr,  # (N, S^2, C), written
    C,
    TERMS: tl.constexpr, LISTED: tl.constexpr,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the moments of one order of an atom. If TERMS is 0, the value of an edge is its message for every order.

    If LISTED, ``edges`` has the numbers of the atom's edges; otherwise they follow one another. Grid (N, S, blocks).
    """
    atom, order = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    moments = tl.zeros((BLOCK_M, BLOCK_C), moments_ptr.dtype.element_ty)
    last = tl.load(rows_ptr + atom + 1)
    for first in range(tl.load(rows_ptr + atom), last, BLOCK_E):
        position = first + tl.arange(0, BLOCK_E)
        some = position < last
        edge = position.to(tl.int64)
        if LISTED:
            edge = tl.load(edges_ptr + position, mask=some, other=0).to(tl.int64)
        mask = some[:, None] & inside[None, :]
        if TERMS == 0:
            value = tl.load(message_ptr + edge[:, None] * C + channel[None, :], mask=mask, other=0.0)
        else:
            value = _product(message_ptr, weight_ptr, edge, order, channel, mask, C, S)
            if TERMS == 2:
                value += _product(more_message_ptr, more_weight_ptr, edge, order, channel, mask, C, S)
        factor = tl.trans(_harmonics(harmonics_ptr, edge, order, some, S, BLOCK_M))
        moments = tl.dot(factor, value, moments, input_precision="ieee", out_dtype=moments.dtype)
    index = tl.arange(0, BLOCK_M)
    row = ((atom * S * S) + order * order + index) * C
    mask = (index < 2 * order + 1)[:, None] & inside[None, :]
    tl.store(moments_ptr + row[:, None] + channel[None, :], moments, mask=mask)


@triton.jit
def _from_moments(
    harmonics_ptr, moments_ptr, atom, edge, order, some, channel, C,
    S: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the part of one order of the sums over all edges on the other side of the atom, (edges, channels)."""
    index = tl.arange(0, BLOCK_M)
    mask = (index < 2 * order + 1)[:, None] & (channel < C)[None, :]
    row = ((atom * S * S) + order * order + index) * C
    moments = tl.load(moments_ptr + row[:, None] + channel[None, :], mask=mask, other=0.0)
    factor = _harmonics(harmonics_ptr, edge, order, some, S, BLOCK_M)
    return tl.dot(factor, moments, input_precision="ieee", out_dtype=moments.dtype)


@triton.jit
def triplet_sum_kernel(
    message_ptr, weight_ptr, more_message_ptr, more_weight_ptr, harmonics_ptr,  # as for the moments
    moments_ptr,  # (N, S^2, C)
    from_ptr, by_source_ptr, reverse_ptr,  # (N + 1,), (E,), (E,)
    sum_ptr,  # (E, C), written
    C,
    TERMS: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the sums of the edges from an atom. Grid (N, ceil(C / BLOCK_C))."""
    atom, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    last = tl.load(from_ptr + atom + 1)
    for first in range(tl.load(from_ptr + atom), last, BLOCK_E):
        position = first + tl.arange(0, BLOCK_E)
        some = position < last
        edge = tl.load(by_source_ptr + position, mask=some, other=0).to(tl.int64)
        reverse = tl.load(reverse_ptr + edge, mask=some, other=-1).to(tl.int64)
        found = (reverse >= 0)[:, None] & (channel < C)[None, :]
        total = tl.zeros((BLOCK_E, BLOCK_C), sum_ptr.dtype.element_ty)
        for order in tl.static_range(S):
            total += _from_moments(harmonics_ptr, moments_ptr, atom, edge, order, some, channel, C, S, BLOCK_M)
            value = _product(message_ptr, weight_ptr, reverse, order, channel, found, C, S)
            if TERMS == 2:
                value += _product(more_message_ptr, more_weight_ptr, reverse, order, channel, found, C, S)
            # Y_l0(pi) = (-1)^l sqrt((2 l + 1) / (4 pi))
            total -= ((1 - 2 * (order % 2)) * ((2 * order + 1) * 0.07957747154594767) ** 0.5) * value
        mask = some[:, None] & (channel < C)[None, :]
        tl.store(sum_ptr + edge[:, None] * C + channel[None, :], total, mask=mask)


@triton.jit
def triplet_gradient_kernel(
    d_sum_ptr,  # (E, C)
    message_ptr, weight_ptr, harmonics_ptr,  # (E, C), (E, S, C), (E, S^2)
    moments_ptr,  # (N, S^2, C), of d_sum
    into_ptr, reverse_ptr,  # (N + 1,), (E,)
    d_message_ptr, d_weight_ptr,  # (E, C), (E, S, C), written
    C,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the edges into an atom. Grid (N, ceil(C / BLOCK_C))."""
    atom, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    last = tl.load(into_ptr + atom + 1)
    for first in range(tl.load(into_ptr + atom), last, BLOCK_E):
        edge = (first + tl.arange(0, BLOCK_E)).to(tl.int64)
        some = edge < last
        mask = some[:, None] & (channel < C)[None, :]
        reverse = tl.load(reverse_ptr + edge, mask=some, other=-1).to(tl.int64)
        found = (reverse >= 0)[:, None] & (channel < C)[None, :]
        opposite = tl.load(d_sum_ptr + reverse[:, None] * C + channel[None, :], mask=found, other=0.0)
        at = edge[:, None] * C + channel[None, :]
        message = tl.load(message_ptr + at, mask=mask, other=0.0)
        d_message = tl.zeros((BLOCK_E, BLOCK_C), d_message_ptr.dtype.element_ty)
        for order in tl.static_range(S):
            d_value = _from_moments(harmonics_ptr, moments_ptr, atom, edge, order, some, channel, C, S, BLOCK_M)
            d_value -= ((1 - 2 * (order % 2)) * ((2 * order + 1) * 0.07957747154594767) ** 0.5) * opposite
            row = ((edge * S + order) * C)[:, None] + channel[None, :]
            d_message += d_value * tl.load(weight_ptr + row, mask=mask, other=0.0)
            tl.store(d_weight_ptr + row, d_value * message, mask=mask)
        tl.store(d_message_ptr + at, d_message, mask=mask)


TILES: dict[str, Tile] = {
    "moments": Tile(columns=64, edges=16, warps=4),
    "sum": Tile(columns=32, edges=16, warps=4),
    "gradient": Tile(columns=32, edges=16, warps=4),
}
"""Tiles by kernel; ``edges``: edges of a matrix product, at least 16."""


def _cut(kernel: str, orders: int, channels: int) -> tuple[int, dict[str, int]]:
    """Return the number of blocks of channels and the launch's constants."""
    tile = TILES[kernel]
    columns, harmonics = (max(16, triton.next_power_of_2(size)) for size in (channels, 2 * orders - 1))
    columns = min(tile.columns, columns)
    constants = {"S": orders, "BLOCK_M": harmonics, "BLOCK_C": columns, "BLOCK_E": tile.edges, "num_warps": tile.warps}
    return triton.cdiv(channels, columns), constants


def _sum(harmonics_EM: Tensor, graph: EdgeGraph, *terms: Tensor) -> Tensor:
    """Return the sums (E, C) of one or two terms, each a message (E, C) and a weight (E, S, C)."""
    terms = tuple(each.contiguous() for each in terms)
    pairs, (edges, orders, channels) = (*terms, None, None)[:4], terms[1].shape
    atoms, count = len(graph.into_N1) - 1, len(terms) // 2
    moments_NMC, sum_EC = terms[0].new_empty(atoms, orders**2, channels), terms[0].new_empty(edges, channels)
    blocks, constants = _cut("moments", orders, channels)
    triplet_moments_kernel[(atoms, orders, blocks)](
        *pairs, harmonics_EM, graph.into_N1, None, moments_NMC, channels, TERMS=count, LISTED=False, **constants
    )
    blocks, constants = _cut("sum", orders, channels)
    triplet_sum_kernel[(atoms, blocks)](
        *pairs, harmonics_EM, moments_NMC, graph.from_N1, graph.by_source_E, graph.reverse_E, sum_EC, channels,
        TERMS=count, **constants,
    )  # fmt: skip
    return sum_EC


def _gradient(
    harmonics_EM: Tensor, graph: EdgeGraph, d_sum_EC: Tensor, message_EC: Tensor, weight_ESC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of message and weight."""
    d_sum_EC, message_EC, weight_ESC = (each.contiguous() for each in (d_sum_EC, message_EC, weight_ESC))
    atoms, (_, orders, channels) = len(graph.into_N1) - 1, weight_ESC.shape
    moments_NMC = d_sum_EC.new_empty(atoms, orders**2, channels)
    d_message_EC, d_weight_ESC = torch.empty_like(message_EC), torch.empty_like(weight_ESC)
    blocks, constants = _cut("moments", orders, channels)
    triplet_moments_kernel[(atoms, orders, blocks)](
        d_sum_EC, None, None, None, harmonics_EM, graph.from_N1, graph.by_source_E, moments_NMC, channels,
        TERMS=0, LISTED=True, **constants,
    )  # fmt: skip
    blocks, constants = _cut("gradient", orders, channels)
    triplet_gradient_kernel[(atoms, blocks)](
        d_sum_EC, message_EC, weight_ESC, harmonics_EM, moments_NMC, graph.into_N1, graph.reverse_E,
        d_message_EC, d_weight_ESC, channels, **constants,
    )  # fmt: skip
    return d_message_EC, d_weight_ESC


class _TripletSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message_EC: Tensor, weight_ESC: Tensor, harmonics_EM: Tensor, graph: EdgeGraph) -> Tensor:
        ctx.save_for_backward(message_EC, weight_ESC)
        ctx.constants = harmonics_EM, graph
        return _sum(harmonics_EM, graph, message_EC, weight_ESC)

    @staticmethod
    def backward(ctx: Any, *d_sum_EC: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor, Tensor] = _Gradient.apply(*d_sum_EC, *ctx.saved_tensors, *ctx.constants)
        return *gradients, None, None


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, d_sum_EC: Tensor, message_EC: Tensor, weight_ESC: Tensor, harmonics_EM: Tensor, graph: EdgeGraph
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(d_sum_EC, message_EC, weight_ESC)
        ctx.constants = harmonics_EM, graph
        return _gradient(harmonics_EM, graph, d_sum_EC, message_EC, weight_ESC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dd_message_EC, dd_weight_ESC), (harmonics_EM, graph) = gradients, ctx.constants
        d_sum_EC, message_EC, weight_ESC = ctx.saved_tensors
        dd_sum_EC = _sum(harmonics_EM, graph, dd_message_EC, weight_ESC, message_EC, dd_weight_ESC)
        return dd_sum_EC, *_gradient(harmonics_EM, graph, d_sum_EC, *gradients), None, None


def triplet_sum(message_EC: Tensor, weight_ESC: Tensor, harmonics_EM: Tensor, graph: EdgeGraph) -> Tensor:
    """Return the sums, (E, C), the same bits every time, with two derivatives by message and weight.

    See :func:`benchmarks.oc20.ops.triplet_sum.triplet_sum_reference`.

    Raises:
        ValueError: a tensor is not contiguous, or the harmonics need a gradient.
    """
    if harmonics_EM.requires_grad:
        raise ValueError("the kernels have no derivative by directions; detach them or choose the reference")
    require_contiguous(harmonics=harmonics_EM, **graph._asdict())
    sum_EC: Tensor = _TripletSum.apply(message_EC, weight_ESC, harmonics_EM, graph)
    return sum_EC
