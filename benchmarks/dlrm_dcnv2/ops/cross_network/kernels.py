# mypy: allow-untyped-defs
"""Triton kernels of a cross layer, ``y = x0 * h + x`` with ``h = u W^T + b``.

Forward: the product with the cross in its epilogue. It reads x0 and x and writes h and y, beside the factors; at 6,912
samples, X = 3456, in 16 bit, 191 MB, 47 us at 4.1 TB/s on an H200, where the product's 24.5 GFLOP take 35-40 us.
Backward: one pass that reads dy, x0, h and, in all layers but the last, dx0, and writes dh and dx0: 239 and 287 MB, 58
and 70 us. Its sums over the samples stay in registers until a program's end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.tiling.kernels import load_row, load_tile, own_columns, store_tile, tile_at


@triton.jit
def cross_product_kernel(
    u_ptr,  # (B, R)
    w_ptr,  # (X, R)
    b_ptr,  # (X,)
    x0_ptr, x_ptr,  # (B, X)
    h_ptr,  # (B, X), written if KEEP
    y_ptr,  # (B, X)
    B, X, R,
    KEEP: tl.constexpr, EVEN: tl.constexpr, EVEN_R: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (B / BLOCK_B * X / BLOCK_X,). GROUP blocks of samples go through all columns together, for the L2 cache."""
    blocks = tl.cdiv(B, BLOCK_B)
    columns = tl.cdiv(X, BLOCK_X)
    group = tl.program_id(0) // (GROUP * columns)
    size = tl.minimum(blocks - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * columns)
    first_row = (group * GROUP + within % size) * BLOCK_B
    first_column = within // size * BLOCK_X
    row = tl.arange(0, BLOCK_B)
    column = tl.arange(0, BLOCK_X)
    depth = tl.arange(0, BLOCK_R)
    # what lies outside reads a line of its own side again, and is not written
    u_ptrs = u_ptr + first_row.to(tl.int64) * R + (row % (B - first_row))[:, None] * R + depth[None, :]
    w_ptrs = w_ptr + first_column * R + (column % (X - first_column))[None, :] * R + depth[:, None]
    h = tl.zeros((BLOCK_B, BLOCK_X), tl.float32)
    for r in range(0, R, BLOCK_R):
        if EVEN_R:
            u = tl.load(u_ptrs + r)
            w = tl.load(w_ptrs + r)
        else:
            u = tl.load(u_ptrs + r, mask=(r + depth < R)[None, :], other=0.0)
            w = tl.load(w_ptrs + r, mask=(r + depth < R)[:, None], other=0.0)
        h = tl.dot(u, w, h, input_precision="ieee")

    # half the columns at once, which leaves room in the registers for another program
    first = first_row.to(tl.int64) * X + first_column
    halves = tl.split(tl.permute(tl.reshape(h, (BLOCK_B, 2, BLOCK_X // 2)), (0, 2, 1)))
    for half in tl.static_range(2):
        column = half * (BLOCK_X // 2) + tl.arange(0, BLOCK_X // 2)
        mask = (row < B - first_row)[:, None] & (column < X - first_column)[None, :]
        place = row[:, None] * X + column[None, :]
        h = halves[half] + load_row(b_ptr + first_column, column, column < X - first_column)
        x0 = load_tile(x0_ptr + first, place, mask, EVEN)
        x = load_tile(x_ptr + first, place, mask, EVEN)
        if KEEP:
            store_tile(h_ptr + first, place, h, mask, EVEN)
        store_tile(y_ptr + first, place, x0 * h + x, mask, EVEN)


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
    """dh, its column sums, and the part of x0's gradient. Grid (programs, C / BLOCK_C, 1)."""
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
