# mypy: allow-untyped-defs
"""Triton kernel of the backward pass of a cross layer ``y = x0 * h + x``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.dlrm_dcnv2.ops.cross_network import apply
from common.ops.tile import Tile
from common.ops.tiling import column_sums, cut, load_tile, own_columns, store_tile, tile_at
from common.ops.triton_support import require_contiguous


@triton.jit
def cross_gradient_kernel(
    dy_ptr, x0_ptr, h_ptr,  # (V, C)
    dh_ptr,  # (V, C)
    dx0_ptr,  # (V, C), read first if ADDED
    partial_ptr,  # (programs, C) fp32
    V, C,
    ADDED: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write dh, partial column sums of dh, and dx0. Grid (programs, ceil(C / BLOCK_C), 1)."""
    column, inside = own_columns(1, C, BLOCK_C)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        dy = load_tile(dy_ptr + base, offset, mask, EVEN)
        dh = dy * load_tile(x0_ptr + base, offset, mask, EVEN)
        dx0 = dy * load_tile(h_ptr + base, offset, mask, EVEN)
        if ADDED:
            dx0 += load_tile(dx0_ptr + base, offset, mask, EVEN)
        if FIRST:
            dx0 += dy
        store_tile(dh_ptr + base, offset, dh, mask, EVEN)
        store_tile(dx0_ptr + base, offset, dx0, mask, EVEN)
        total += dh
    tl.store(partial_ptr + tl.program_id(0) * C + column, tl.sum(total, 0), mask=inside)


TILES: dict[str, Tile] = {"gradient": Tile(columns=128, elements=4096, warps=4, programs=6, stages=1)}
"""Tile of each pass."""


def gradient(
    dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, dx0_BX: Tensor | None, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of h and x0, (B, X), and of the bias, (X,) fp32.

    See :func:`benchmarks.dlrm_dcnv2.ops.cross_network.gradient_reference`. Takes two launches.
    """
    dy_BX = dy_BX.contiguous()
    require_contiguous(x0=x0_BX, h=h_BX)
    added = dx0_BX is not None
    if dx0_BX is None:
        dx0_BX = torch.empty_like(x0_BX)
    samples, inputs = dy_BX.shape
    dh_BX = torch.empty_like(dy_BX)
    grid, arguments = cut(TILES["gradient"], 1, samples, inputs, dy_BX.device, reverse=False)
    partial_PX = dy_BX.new_empty((grid[0], inputs), dtype=torch.float32)
    cross_gradient_kernel[grid](
        dy_BX, x0_BX, h_BX, dh_BX, dx0_BX, partial_PX, samples, inputs, ADDED=added, FIRST=first, **arguments
    )
    return dh_BX, dx0_BX, column_sums(partial_PX, torch.float32)


def cross_network(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return the output (B, X) of the last layer.

    See :func:`benchmarks.dlrm_dcnv2.ops.cross_network.cross_network_reference`.

    Raises:
        ValueError: ``x0_BX`` is not contiguous.
    """
    require_contiguous(x0=x0_BX)
    return apply(gradient, x0_BX, v, w, b)
