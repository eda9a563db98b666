# mypy: allow-untyped-defs
"""Triton kernels of the sum over triplets and of its transpose, without atomics.

A program has one atom j. It sums the moments of the edges on one side of j, which stay in its registers, and writes the
sums of the edges on the other side.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.oc20.ops.triplet_sum import EdgeGraph
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous


@triton.jit
def _opposite(order, S: tl.constexpr):
    """Return Y_l0(pi) of an order l, a scalar of fp64; 0.0795... is 1 / (4 pi)."""
    weight = tl.full((), 0.0, tl.float64)
    for own in tl.static_range(S):
        exact = tl.full((), (1 - 2 * (own % 2)) * ((2 * own + 1) * 0.07957747154594767) ** 0.5, tl.float64)
        weight = tl.where(order == own, exact, weight)
    return weight


@triton.jit
def triplet_sum_kernel(
    value_ptr,  # (E, S, C)
    harmonics_ptr,  # (E, S^2)
    into_ptr, from_ptr,  # (N + 1,)
    by_source_ptr, reverse_ptr,  # (E,)
    sum_ptr,  # (E, C), written
    C,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the sums of the edges from an atom. Grid (N, ceil(C / BLOCK_C))."""
    atom, channel = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    index = tl.arange(0, BLOCK_M)
    known, inside = index < S * S, channel < C
    order = tl.zeros((BLOCK_M,), tl.int32)
    for limit in tl.static_range(1, S):
        order += (index >= limit * limit).to(tl.int32)
    moments = tl.zeros((BLOCK_M, BLOCK_C), sum_ptr.dtype.element_ty)
    for incoming in range(tl.load(into_ptr + atom).to(tl.int64), tl.load(into_ptr + atom + 1).to(tl.int64)):
        factor = tl.load(harmonics_ptr + incoming * (S * S) + index, mask=known, other=0.0)
        row = (incoming * S + order) * C
        value = tl.load(value_ptr + row[:, None] + channel[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        moments += factor[:, None] * value
    last = tl.load(from_ptr + atom + 1)
    for first in range(tl.load(from_ptr + atom), last, BLOCK_E):
        position = first + tl.arange(0, BLOCK_E)
        some = position < last
        edge = tl.load(by_source_ptr + position, mask=some, other=0).to(tl.int64)
        both = some[:, None] & known[None, :]
        factor = tl.load(harmonics_ptr + edge[:, None] * (S * S) + index[None, :], mask=both, other=0.0)
        total = tl.dot(factor, moments, input_precision="ieee", out_dtype=moments.dtype)
        reverse = tl.load(reverse_ptr + edge, mask=some, other=-1).to(tl.int64)
        found = (reverse >= 0)[:, None] & inside[None, :]
        for own in tl.static_range(S):
            row = (reverse * S + own) * C
            value = tl.load(value_ptr + row[:, None] + channel[None, :], mask=found, other=0.0)
            total -= _opposite(own, S).to(total.dtype) * value
        tl.store(sum_ptr + edge[:, None] * C + channel[None, :], total, mask=some[:, None] & inside[None, :])


@triton.jit
def triplet_transposed_kernel(
    d_sum_ptr,  # (E, C)
    harmonics_ptr,  # (E, S^2)
    into_ptr, from_ptr,  # (N + 1,)
    by_source_ptr, reverse_ptr,  # (E,)
    d_value_ptr,  # (E, S, C), written
    C,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write one order of the edges into an atom. Grid (N, S, ceil(C / BLOCK_C)); BLOCK_M covers 2 S - 1."""
    atom, order = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    index, inside = order * order + tl.arange(0, BLOCK_M), channel < C
    known = tl.arange(0, BLOCK_M) < 2 * order + 1
    moments = tl.zeros((BLOCK_M, BLOCK_C), d_value_ptr.dtype.element_ty)
    last = tl.load(from_ptr + atom + 1)
    for first in range(tl.load(from_ptr + atom), last, BLOCK_E):
        position = first + tl.arange(0, BLOCK_E)
        some = position < last
        edge = tl.load(by_source_ptr + position, mask=some, other=0).to(tl.int64)
        both = known[:, None] & some[None, :]
        factor = tl.load(harmonics_ptr + edge[None, :] * (S * S) + index[:, None], mask=both, other=0.0)
        both = some[:, None] & inside[None, :]
        d_sum = tl.load(d_sum_ptr + edge[:, None] * C + channel[None, :], mask=both, other=0.0)
        moments = tl.dot(factor, d_sum, moments, input_precision="ieee", out_dtype=moments.dtype)
    opposite = _opposite(order, S).to(moments.dtype)
    last = tl.load(into_ptr + atom + 1)
    for first in range(tl.load(into_ptr + atom), last, BLOCK_E):
        edge = (first + tl.arange(0, BLOCK_E)).to(tl.int64)
        some = edge < last
        both = some[:, None] & known[None, :]
        factor = tl.load(harmonics_ptr + edge[:, None] * (S * S) + index[None, :], mask=both, other=0.0)
        total = tl.dot(factor, moments, input_precision="ieee", out_dtype=moments.dtype)
        reverse = tl.load(reverse_ptr + edge, mask=some, other=-1).to(tl.int64)
        found = (reverse >= 0)[:, None] & inside[None, :]
        total -= opposite * tl.load(d_sum_ptr + reverse[:, None] * C + channel[None, :], mask=found, other=0.0)
        row = (edge * S + order) * C
        tl.store(d_value_ptr + row[:, None] + channel[None, :], total, mask=some[:, None] & inside[None, :])


TILES: dict[str, Tile] = {"sum": Tile(columns=32, edges=16, warps=4), "transposed": Tile(columns=64, edges=16, warps=4)}
"""Tiles by kernel; ``edges``: edges of a matrix product, at least 16."""


class _TripletSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_ESC: Tensor, harmonics_EM: Tensor, graph: EdgeGraph) -> Tensor:
        ctx.harmonics_EM, ctx.graph = harmonics_EM, graph
        edges, orders, channels = value_ESC.shape
        sum_EC, tile = value_ESC.new_empty(edges, channels), TILES["sum"]
        columns = min(tile.columns, max(16, triton.next_power_of_2(channels)))
        triplet_sum_kernel[(len(graph.into_N1) - 1, triton.cdiv(channels, columns))](
            value_ESC.contiguous(), harmonics_EM, graph.into_N1, graph.from_N1, graph.by_source_E, graph.reverse_E,
            sum_EC, channels, S=orders, BLOCK_M=max(16, triton.next_power_of_2(orders**2)), BLOCK_C=columns,
            BLOCK_E=tile.edges, num_warps=tile.warps,
        )  # fmt: skip
        return sum_EC

    @staticmethod
    def backward(ctx: Any, *d_sum_EC: Tensor) -> tuple[Tensor, None, None]:
        return _Transposed.apply(*d_sum_EC, ctx.harmonics_EM, ctx.graph), None, None


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, d_sum_EC: Tensor, harmonics_EM: Tensor, graph: EdgeGraph) -> Tensor:
        ctx.harmonics_EM, ctx.graph = harmonics_EM, graph
        (edges, channels), orders = d_sum_EC.shape, round(harmonics_EM.shape[1] ** 0.5)
        d_value_ESC, tile = d_sum_EC.new_empty(edges, orders, channels), TILES["transposed"]
        columns = min(tile.columns, max(16, triton.next_power_of_2(channels)))
        triplet_transposed_kernel[(len(graph.into_N1) - 1, orders, triton.cdiv(channels, columns))](
            d_sum_EC.contiguous(), harmonics_EM, graph.into_N1, graph.from_N1, graph.by_source_E, graph.reverse_E,
            d_value_ESC, channels, S=orders, BLOCK_M=max(16, triton.next_power_of_2(2 * orders - 1)), BLOCK_C=columns,
            BLOCK_E=tile.edges, num_warps=tile.warps,
        )  # fmt: skip
        return d_value_ESC

    @staticmethod
    def backward(ctx: Any, *value_ESC: Tensor) -> tuple[Tensor, None, None]:
        return _TripletSum.apply(*value_ESC, ctx.harmonics_EM, ctx.graph), None, None


def triplet_sum(value_ESC: Tensor, harmonics_EM: Tensor, graph: EdgeGraph) -> Tensor:
    """Return the sums, (E, C), the same bits every time, with derivatives of any order by the values.

    See :func:`benchmarks.oc20.ops.triplet_sum.triplet_sum_reference`.

    Raises:
        ValueError: a tensor is not contiguous, or the harmonics need a gradient.
    """
    if harmonics_EM.requires_grad:
        raise ValueError("the kernels have no derivative by directions; detach them or choose the reference")
    require_contiguous(harmonics=harmonics_EM, **graph._asdict())
    sum_EC: Tensor = _TripletSum.apply(value_ESC, harmonics_EM, graph)
    return sum_EC
