# mypy: allow-untyped-defs
"""Triton kernels of a cross layer, ``y = x0 * h + x`` with ``h = u W^T + b`` and ``u = x V^T``.

Memory takes longer than the products, whose 24.5 GFLOP take 35-40 us on an H200 at 6,912 samples, X = 3456, R = 512 in
16 bit. Bytes, and time at 4.1 TB/s:

- forward: the product with the cross in its epilogue. Reads x0 and x, writes h and y: 191 MB, 47 us.
- backward of the last layer: one pass that reads dy, x0 and h, writes dh and dx0: 239 MB, 58 us.
- from a layer to the one before: the product ``du V`` with that pass in its epilogue. Reads dy of the one, and x0, h
  and dx0, writes dy, dh and dx0 of the other: 334 MB, 82 us; before the first layer dy is not needed: 287 MB, 70 us.

Column sums over the samples are added up in registers within a program, and over programs in a second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.tiling.kernels import load_row, load_tile, own_columns, store_tile, tile_at


@triton.jit
def _own_block(B, X, BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr, GROUP: tl.constexpr):
    """Number of this program's block of samples, and its first column.

    GROUP blocks of samples go through all columns together, for the L2 cache.
    """
    blocks = tl.cdiv(B, BLOCK_B)
    columns = tl.cdiv(X, BLOCK_X)
    group = tl.program_id(0) // (GROUP * columns)
    size = tl.minimum(blocks - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * columns)
    return group * GROUP + within % size, within // size * BLOCK_X


@triton.jit
def _product(
    u_ptr, w_ptr, rows, columns, R, stride_x, stride_r,
    EVEN: tl.constexpr, EVEN_R: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(B, R) times (R, X), from the first row and column on; a quarter of the columns after another.

    Args:
        rows, columns: that exist from there on; those beyond read others again.
        stride_x, stride_r: elements from a column, and from a line, to the next of the second factor.
    """
    row = tl.arange(0, BLOCK_B)
    column = tl.arange(0, BLOCK_X)
    if not EVEN:  # a remainder hides from the compiler that columns are neighbours, which would load 2 bytes at a time
        row = row % rows
        column = column % columns
    depth = tl.arange(0, BLOCK_R)
    u_ptrs = u_ptr + row[:, None] * R + depth[None, :]
    w_ptrs = w_ptr + depth[:, None] * stride_r + column[None, :] * stride_x
    total = tl.zeros((BLOCK_B, BLOCK_X), tl.float32)
    for r in range(0, R, BLOCK_R):
        if EVEN_R:
            u = tl.load(u_ptrs + r)
            w = tl.load(w_ptrs + r * stride_r)
        else:
            u = tl.load(u_ptrs + r, mask=(r + depth < R)[None, :], other=0.0)
            w = tl.load(w_ptrs + r * stride_r, mask=(r + depth < R)[:, None], other=0.0)
        total = tl.dot(u, w, total, input_precision="ieee")
    left, right = _halves(total, BLOCK_B, BLOCK_X)
    first, second = _halves(left, BLOCK_B, BLOCK_X // 2)
    third, fourth = _halves(right, BLOCK_B, BLOCK_X // 2)
    return first, second, third, fourth


@triton.jit
def _halves(tile, BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr):
    """The left and the right columns."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_B, 2, BLOCK_X // 2)), (0, 2, 1)))


@triton.jit
def _quarter(number: tl.constexpr, rows, columns, X, BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr):
    """Columns, which of them exist, places and mask of a quarter of a tile.

    Epilogues take a quarter of the columns at once, which leaves room in the registers for another program.
    """
    row = tl.arange(0, BLOCK_B)
    column = number * (BLOCK_X // 4) + tl.arange(0, BLOCK_X // 4)
    inside = column < columns
    return column, inside, row[:, None] * X + column[None, :], (row < rows)[:, None] & inside[None, :]


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
    """h and y. Grid (B / BLOCK_B * X / BLOCK_X,)."""
    block, first_column = _own_block(B, X, BLOCK_B, BLOCK_X, GROUP)
    first_row = (block * BLOCK_B).to(tl.int64)
    rows, columns = B - block * BLOCK_B, X - first_column
    quarters = _product(
        u_ptr + first_row * R, w_ptr + first_column * R, rows, columns, R, R, 1, EVEN, EVEN_R, BLOCK_B, BLOCK_X, BLOCK_R
    )
    first = first_row * X + first_column
    for number in tl.static_range(4):
        column, inside, place, mask = _quarter(number, rows, columns, X, BLOCK_B, BLOCK_X)
        h = quarters[number] + load_row(b_ptr + first_column, column, inside)
        x0 = load_tile(x0_ptr + first, place, mask, EVEN)
        x = load_tile(x_ptr + first, place, mask, EVEN)
        if KEEP:
            store_tile(h_ptr + first, place, h, mask, EVEN)
        store_tile(y_ptr + first, place, x0 * h + x, mask, EVEN)


@triton.jit
def cross_between_kernel(
    du_ptr,  # (B, R)
    v_ptr,  # (R, X)
    dy_ptr,  # (B, X)
    x0_ptr, h_ptr,  # (B, X), of the layer before
    dx_ptr,  # (B, X), written unless FIRST
    dh_ptr,  # (B, X)
    dx0_ptr,  # (B, X), added to
    partial_ptr,  # (B / BLOCK_B, X) fp32
    B, X, R,
    FIRST: tl.constexpr, EVEN: tl.constexpr, EVEN_R: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of a layer's input, and with it dh, its column sums and dx0 of the layer before.

    Grid (B / BLOCK_B * X / BLOCK_X,).
    """
    block, first_column = _own_block(B, X, BLOCK_B, BLOCK_X, GROUP)
    first_row = (block * BLOCK_B).to(tl.int64)
    rows, columns = B - block * BLOCK_B, X - first_column
    quarters = _product(
        du_ptr + first_row * R, v_ptr + first_column, rows, columns, R, 1, X, EVEN, EVEN_R, BLOCK_B, BLOCK_X, BLOCK_R
    )
    first = first_row * X + first_column
    for number in tl.static_range(4):
        column, inside, place, mask = _quarter(number, rows, columns, X, BLOCK_B, BLOCK_X)
        dx = quarters[number] + load_tile(dy_ptr + first, place, mask, EVEN)
        dh = dx * load_tile(x0_ptr + first, place, mask, EVEN)
        dx0 = load_tile(dx0_ptr + first, place, mask, EVEN) + dx * load_tile(h_ptr + first, place, mask, EVEN)
        if FIRST:
            dx0 += dx
        else:
            store_tile(dx_ptr + first, place, dx, mask, EVEN)
        store_tile(dh_ptr + first, place, dh, mask, EVEN)
        store_tile(dx0_ptr + first, place, dx0, mask, EVEN)
        if not EVEN:
            dh = tl.where(mask, dh, 0.0)
        tl.store(partial_ptr + block * X + first_column + column, tl.sum(dh, 0), mask=inside)


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
