# mypy: allow-untyped-defs
"""Triton kernel of the backward pass of a cross layer ``y = x0 * h + x``."""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.tiling.kernels import load_tile, own_columns, store_tile, tile_at


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
