# mypy: allow-untyped-defs
"""Triton kernels of the products over whole rows: projection of gathered rows, and the gradient of the inputs.

Both are grouped: a table, built from the capacities, assigns each tile of rows to one relation, or of nodes to one
type. Tiles beyond the device's counts end at once. Neighbouring programs have the same rows and different columns, so
all but one of them read the rows from the L2 cache; all read the weight from there.

Indices beyond the last row are clamped to it, which avoids masks; their results are not stored.

With 2,048 seeds, the first convolution projects about 2.6 million rows from 1024 to 512: 2.7 TFLOP, 4 ms at 670
TFLOP/s on an H200. It gathers 2.6 GB and writes 2.6 GB.

Legend: N nodes, M rows, K inputs, D outputs of A heads, R relations, T pairs of relation and target.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS: tl.constexpr = tl.constexpr(0)
"""Field of the relations table: offset of the relation's rows in the block."""
ROWS_OF_LEVEL: tl.constexpr = tl.constexpr(1)
"""Field: offset of its rows in the tensors of the level."""
SOURCES: tl.constexpr = tl.constexpr(2)
"""Field: offset of the nodes of its source type in the tensors of the level."""
NODE_ROWS: tl.constexpr = tl.constexpr(3)
"""Field: offset of these nodes' rows in ``node_row``."""
TARGETS: tl.constexpr = tl.constexpr(4)
"""Field: offset of its targets in the tensors of the level."""
FIELDS: tl.constexpr = tl.constexpr(5)


@triton.jit
def own_tile(tiles_ptr, tile, counts_ptr):
    """Return the relation or type of a tile, its first row or node, and the number of filled ones in that part."""
    part = tl.load(tiles_ptr + 2 * tile)
    return part, tl.load(tiles_ptr + 2 * tile + 1), tl.load(counts_ptr + part)


@triton.jit
def brought(x, DTYPE: tl.constexpr):
    """Return x in DTYPE. e4m3 goes through fp32, because the direct conversion to bf16 uses slow instructions."""
    if x.dtype == tl.float8e4nv:
        return x.to(tl.float32).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def columns_into(into_ptr, node_type, COLUMNS: tl.constexpr, A: tl.constexpr):
    """Return, for each column of a type's target terms, its relation (negative: unused column) and its head."""
    column = tl.arange(0, COLUMNS)
    return tl.load(into_ptr + node_type * COLUMNS + column), column % A


@triton.jit(do_not_specialize_on_alignment=["counts_ptr"])
def projection_rows_kernel(
    x_ptr,  # (N, K)
    rows_ptr,  # of the block
    counts_ptr,  # (R,): rows of the level
    weight_ptr,  # (R, K, D)
    att_ptr,  # (R, D) fp32
    z_ptr,  # (M, D)
    term_ptr,  # (M, A) fp32
    relations_ptr,  # (R, FIELDS)
    tiles_ptr,  # (tiles, 2)
    K: tl.constexpr, D: tl.constexpr, A: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write z and source terms. Grid (tiles * ceil(D / BLOCK_D),). BLOCK_D columns are whole heads."""
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    head_size: tl.constexpr = D // A
    heads: tl.constexpr = (BLOCK_D if BLOCK_D < D else D) // head_size
    relation, first, count = own_tile(tiles_ptr, tl.program_id(0) // blocks, counts_ptr)
    if first >= count:
        return
    offsets = relations_ptr + relation * FIELDS
    row = first + tl.arange(0, BLOCK_M)
    node = tl.load(rows_ptr + tl.load(offsets + ROWS) + tl.minimum(row, count - 1))
    node = (tl.load(offsets + SOURCES) + node).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK_D
    column = start + tl.arange(0, BLOCK_D)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + node[:, None] * K + depth[None, :]
    weight_ptrs = weight_ptr + relation * (K * D) + depth[:, None] * D + column[None, :]
    z = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + k)
        else:
            x = tl.load(x_ptrs + k, mask=(k + depth < K)[None, :], other=0.0)
        if K % BLOCK_K == 0 and D % BLOCK_D == 0:
            weight = tl.load(weight_ptrs + k * D)
        else:
            weight = tl.load(weight_ptrs + k * D, mask=(k + depth < K)[:, None] & (column < D)[None, :], other=0.0)
        z = tl.dot(brought(x, weight.dtype), weight, z, input_precision="ieee")
    exists = row < count
    place = (tl.load(offsets + ROWS_OF_LEVEL) + row).to(tl.int64)
    for own in tl.static_range(heads):
        head = start // head_size + own
        inside = (column // head_size == head) & (column < D)
        att = tl.load(att_ptr + relation * D + column, mask=inside, other=0.0)
        tl.store(term_ptr + place * A + head, tl.sum(z * att[None, :], 1), mask=row < tl.where(head < A, count, 0))
    mask = exists[:, None] & (column < D)[None, :]
    tl.store(z_ptr + place[:, None] * D + column[None, :], z.to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["counts_ptr", "row_counts_ptr", "target_counts_ptr"])
def projection_input_gradient_kernel(
    dz_ptr,  # (M, D)
    dterm_ptr,  # (T, A) fp32
    node_row_ptr,  # of the block
    counts_ptr,  # (types,): nodes of the level
    row_counts_ptr,  # (R,): rows of the level
    target_counts_ptr,  # (types,): nodes of the level that are targets
    weight_ptr,  # (R, K, D)
    v_ptr,  # (R, K, A) fp32
    dx_ptr,  # (N, K)
    relations_ptr,  # (R, FIELDS)
    from_ptr,  # (types + 1,): offset of each type in ``relations_from_ptr``
    relations_from_ptr,  # (R,): relations that have rows, by their source type
    into_ptr,  # (types, COLUMNS)
    node_offsets_ptr,  # (types,): of the level
    tiles_ptr,  # (tiles, 2)
    K: tl.constexpr, D: tl.constexpr, A: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the inputs. Grid (tiles * ceil(K / BLOCK_K),).

    A relation without a row for any node of the tile is skipped, which is frequent because the nodes that a relation
    discovered have neighbouring numbers.
    """
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    node_type, first, count = own_tile(tiles_ptr, tl.program_id(0) // blocks, counts_ptr)
    if first >= count:
        return
    node = first + tl.arange(0, BLOCK_N)
    exists = node < count
    column = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    depth = tl.arange(0, BLOCK_D)
    dx = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for index in range(tl.load(from_ptr + node_type), tl.load(from_ptr + node_type + 1)):
        relation = tl.load(relations_from_ptr + index)
        offsets = relations_ptr + relation * FIELDS
        row = tl.load(node_row_ptr + tl.load(offsets + NODE_ROWS) + node, mask=exists, other=-1)
        found = (row >= 0) & (row < tl.load(row_counts_ptr + relation))
        if tl.max(found.to(tl.int32), 0) > 0:
            place = (tl.load(offsets + ROWS_OF_LEVEL) + tl.where(found, row, 0)).to(tl.int64)
            dz_ptrs = dz_ptr + place[:, None] * D + depth[None, :]
            weight_ptrs = weight_ptr + relation * (K * D) + column[:, None] * D + depth[None, :]
            for d in range(0, D, BLOCK_D):
                if D % BLOCK_D == 0:
                    dz = tl.load(dz_ptrs + d, mask=found[:, None], other=0.0)
                else:
                    dz = tl.load(dz_ptrs + d, mask=found[:, None] & (d + depth < D)[None, :], other=0.0)
                if K % BLOCK_K == 0 and D % BLOCK_D == 0:
                    weight = tl.load(weight_ptrs + d)
                else:
                    mask = (column < K)[:, None] & (d + depth < D)[None, :]
                    weight = tl.load(weight_ptrs + d, mask=mask, other=0.0)
                dx = tl.dot(dz, tl.trans(weight), dx, input_precision="ieee")
    targets = tl.load(target_counts_ptr + node_type)
    if first < targets:
        relation, head = columns_into(into_ptr, node_type, COLUMNS, A)
        known = relation >= 0
        place = tl.load(relations_ptr + relation * FIELDS + TARGETS, mask=known, other=0).to(tl.int64)
        place = (place[None, :] + node[:, None]) * A + head[None, :]
        dterm = tl.load(dterm_ptr + place, mask=(node < targets)[:, None] & known[None, :], other=0.0)
        v = tl.load(
            v_ptr + (relation * K * A + head)[:, None] + column[None, :] * A,
            mask=known[:, None] & (column < K)[None, :],
            other=0.0,
        )
        dx = tl.dot(dterm, v, dx, input_precision=PRECISION)
    own = (tl.load(node_offsets_ptr + node_type) + node).to(tl.int64)
    mask = exists[:, None] & (column < K)[None, :]
    tl.store(dx_ptr + own[:, None] * K + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
