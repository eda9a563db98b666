# mypy: allow-untyped-defs
"""Triton kernels of the products over rows and targets, and of their gradients.

All are grouped: a table, built from the capacities, assigns each tile of rows to one relation, or of nodes to one
type. Tiles beyond the device's counts end at once. Neighbouring programs have the same rows and different columns, so
all but one of them read the rows from the L2 cache; all read the weight from there. Indices beyond the last row are
clamped to it, which avoids masks; their results are not stored.

- **Rows**: with 2,048 seeds, the first convolution projects about 2.6 million rows from 1024 to 512: 2.7 TFLOP, 4 ms
  at 670 TFLOP/s on an H200. It gathers 2.6 GB and writes 2.6 GB.
- **Target terms**: every target of a type times the vectors of all relations into the type. x is read once: about
  400,000 rows of 1 KB, 0.1 ms at 4 TB/s. The vectors are fp32. For inputs of at most 16 bits, a vector is split into
  the sum of two parts in the product's dtype, which preserves at least 16 bits of it. The second product costs little,
  because tensor cores are not busy.
- **Gradients of weights and vectors** are sums over rows or targets. A relation may have a million rows, with a result
  of 1024 x 512. The rows are therefore cut into splits: a program computes one tile of the result over one split, and
  a second kernel adds the splits in order. Writing and reading the partial sums of about 80 splits of 2 MB takes 0.08
  ms, compared with 4 ms for the products. Atomics could not save more, and would make results irreproducible.
  Neighbouring programs have tiles of the same split, and read the same rows.

Shapes: N nodes, M rows, K inputs, D outputs of A heads, R relations, S splits, T pairs of relation and target.
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
    offset = (tl.load(offsets + ROWS_OF_LEVEL) + row).to(tl.int64)
    for own in tl.static_range(heads):
        head = start // head_size + own
        inside = (column // head_size == head) & (column < D)
        att = tl.load(att_ptr + relation * D + column, mask=inside, other=0.0)
        tl.store(term_ptr + offset * A + head, tl.sum(z * att[None, :], 1), mask=row < tl.where(head < A, count, 0))
    mask = exists[:, None] & (column < D)[None, :]
    tl.store(z_ptr + offset[:, None] * D + column[None, :], z.to(z_ptr.dtype.element_ty), mask=mask)


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
    """Write dx = sum over relations of dz W^T + sum over relations and heads of dterm v^T, the inputs' gradient.

    Only nodes with a row of a relation get its first term, and only targets the second. Grid (tiles * ceil(K /
    BLOCK_K),). A relation without a row for any node of the tile is skipped, which is frequent because nodes first
    reached through one relation have consecutive numbers.
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
            offset = (tl.load(offsets + ROWS_OF_LEVEL) + tl.where(found, row, 0)).to(tl.int64)
            dz_ptrs = dz_ptr + offset[:, None] * D + depth[None, :]
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
        offset = tl.load(relations_ptr + relation * FIELDS + TARGETS, mask=known, other=0).to(tl.int64)
        offset = (offset[None, :] + node[:, None]) * A + head[None, :]
        dterm = tl.load(dterm_ptr + offset, mask=(node < targets)[:, None] & known[None, :], other=0.0)
        v = tl.load(
            v_ptr + (relation * K * A + head)[:, None] + column[None, :] * A,
            mask=known[:, None] & (column < K)[None, :],
            other=0.0,
        )
        dx = tl.dot(dterm, v, dx, input_precision=PRECISION)
    own = (tl.load(node_offsets_ptr + node_type) + node).to(tl.int64)
    mask = exists[:, None] & (column < K)[None, :]
    tl.store(dx_ptr + own[:, None] * K + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_product(left, right, total, PRECISION: tl.constexpr):
    """Return ``total`` plus the product with an fp32 matrix, which is split into two parts if ``left`` has 16 bits."""
    if left.dtype == tl.float32:
        return tl.dot(left, right, total, input_precision=PRECISION)
    else:
        high = right.to(left.dtype)
        total = tl.dot(left, high, total)
        return tl.dot(left, (right - high.to(tl.float32)).to(left.dtype), total)


@triton.jit(do_not_specialize_on_alignment=["counts_ptr"])
def projection_terms_kernel(
    x_ptr,  # (N, K)
    counts_ptr,  # (types,): nodes of the level that are targets
    v_ptr,  # (R, K, A) fp32
    term_ptr,  # (T, A) fp32
    relations_ptr,  # (R, FIELDS)
    into_ptr,  # (types, COLUMNS)
    node_offsets_ptr,  # (types,): of the level
    tiles_ptr,  # (tiles, 2)
    K: tl.constexpr, A: tl.constexpr, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the target terms. Grid (tiles,). PRODUCT is the dtype to which inputs are converted."""
    node_type, first, count = own_tile(tiles_ptr, tl.program_id(0), counts_ptr)
    if first >= count:
        return
    relation, head = columns_into(into_ptr, node_type, COLUMNS, A)
    known = relation >= 0
    target = first + tl.arange(0, BLOCK_T)
    node = (tl.load(node_offsets_ptr + node_type) + tl.minimum(target, count - 1)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + node[:, None] * K + depth[None, :]
    v_ptrs = v_ptr + (relation * K * A + head)[None, :] + depth[:, None] * A
    term = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + k)
            v = tl.load(v_ptrs + k * A, mask=known[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs + k, mask=(k + depth < K)[None, :], other=0.0)
            v = tl.load(v_ptrs + k * A, mask=known[None, :] & (k + depth < K)[:, None], other=0.0)
        term = add_product(brought(x, PRODUCT), v, term, "ieee")
    offset = tl.load(relations_ptr + relation * FIELDS + TARGETS, mask=known, other=0).to(tl.int64)
    offset = (offset[None, :] + target[:, None]) * A + head[None, :]
    tl.store(term_ptr + offset, term, mask=known[None, :] & (target < count)[:, None])


@triton.jit
def _gathered(x_ptr, node, depth, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the inputs of some nodes."""
    x_ptrs = x_ptr + node.to(tl.int64)[:, None] * K + depth[None, :]
    if K % BLOCK_K == 0:
        return tl.load(x_ptrs)
    else:
        return tl.load(x_ptrs, mask=(depth < K)[None, :], other=0.0)


@triton.jit(do_not_specialize_on_alignment=["counts_ptr"])
def projection_weight_gradient_kernel(
    x_ptr,  # (N, K)
    rows_ptr,  # of the block
    counts_ptr,  # (R,): rows of the level
    dz_ptr,  # (M, D)
    partial_ptr,  # (S, K, D) fp32
    relations_ptr,  # (R, FIELDS)
    splits_ptr,  # (S, 2)
    chunk,
    K: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write partial weight gradients. Grid (S * ceil(K / BLOCK_K) * ceil(D / BLOCK_D),). A split has ``chunk`` rows.

    EARLY is 1 for FP8 inputs, otherwise 0.
    """
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * blocks
    split, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    relation, first, count = own_tile(splits_ptr, split, counts_ptr)
    if first >= count:
        return
    offsets = relations_ptr + relation * FIELDS
    rows_ptrs = rows_ptr + tl.load(offsets + ROWS)
    nodes = tl.load(offsets + SOURCES)
    start = tl.load(offsets + ROWS_OF_LEVEL)
    lane = tl.arange(0, BLOCK_M)
    depth = tile // blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tile % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    dz_offset = lane[:, None] * D + column[None, :]
    dw = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    # The compiler cannot pipeline FP8 loads of a transposed operand, so FP8 inputs are loaded one tile early, in
    # registers. Node numbers are loaded one tile early, so that loads of x do not wait for them.
    node = tl.load(rows_ptrs + tl.minimum(first + lane, count - 1))
    if EARLY:
        x = _gathered(x_ptr, nodes + node, depth, K, BLOCK_K)
        node = tl.load(rows_ptrs + tl.minimum(first + BLOCK_M + lane, count - 1))
    for begin in range(first, tl.minimum(first + chunk, count), BLOCK_M):
        loaded = _gathered(x_ptr, nodes + node, depth, K, BLOCK_K)
        node = tl.load(rows_ptrs + tl.minimum(begin + (1 + EARLY) * BLOCK_M + lane, count - 1))
        row = begin + lane
        dz_ptrs = dz_ptr + (start + begin).to(tl.int64) * D + dz_offset
        if D % BLOCK_D == 0:
            dz = tl.load(dz_ptrs, mask=(row < count)[:, None], other=0.0)
        else:
            dz = tl.load(dz_ptrs, mask=(row < count)[:, None] & (column < D)[None, :], other=0.0)
        if EARLY:
            dw = tl.dot(tl.trans(brought(x, dz.dtype)), dz, dw, input_precision="ieee")
            x = loaded
        else:
            dw = tl.dot(tl.trans(brought(loaded, dz.dtype)), dz, dw, input_precision="ieee")
    offset = (split.to(tl.int64) * K + depth)[:, None] * D + column[None, :]
    tl.store(partial_ptr + offset, dw, mask=(depth < K)[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize_on_alignment=["counts_ptr"])
def projection_terms_gradient_kernel(
    x_ptr,  # (N, K)
    counts_ptr,  # (types,): nodes of the level that are targets
    dterm_ptr,  # (T, A) fp32
    partial_ptr,  # (S, K, COLUMNS) fp32
    relations_ptr,  # (R, FIELDS)
    into_ptr,  # (types, COLUMNS)
    node_offsets_ptr,  # (types,): of the level
    splits_ptr,  # (S, 2)
    chunk,
    K: tl.constexpr, A: tl.constexpr, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write partial gradients of v. Grid (S * ceil(K / BLOCK_K),). A split has ``chunk`` nodes of a type."""
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    split = tl.program_id(0) // blocks
    node_type, first, count = own_tile(splits_ptr, split, counts_ptr)
    if first >= count:
        return
    relation, head = columns_into(into_ptr, node_type, COLUMNS, A)
    known = relation >= 0
    start = tl.load(relations_ptr + relation * FIELDS + TARGETS, mask=known, other=0).to(tl.int64)
    nodes = tl.load(node_offsets_ptr + node_type)
    lane = tl.arange(0, BLOCK_T)
    depth = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    dv = tl.zeros((BLOCK_K, COLUMNS), tl.float32)
    for begin in range(first, tl.minimum(first + chunk, count), BLOCK_T):
        target = begin + lane
        node = (nodes + tl.minimum(target, count - 1)).to(tl.int64)
        x_ptrs = x_ptr + node[:, None] * K + depth[None, :]
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(depth < K)[None, :], other=0.0)
        offset = (start[None, :] + target[:, None]) * A + head[None, :]
        dterm = tl.load(dterm_ptr + offset, mask=(target < count)[:, None] & known[None, :], other=0.0)
        dv = add_product(tl.trans(brought(x, PRODUCT)), dterm, dv, PRECISION)
    offset = (split.to(tl.int64) * K + depth)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(partial_ptr + offset, dv, mask=(depth < K)[:, None])


@triton.jit(do_not_specialize_on_alignment=["counts_ptr"])
def projection_sums_kernel(
    partial_ptr,  # (S, K, P) fp32
    sums_ptr,  # (R, K, W)
    counts_ptr,  # counts of relations or types
    parts_ptr,  # (R, 4): index of the count, first split, number of splits, first of the W columns of P
    chunk,
    K: tl.constexpr, P: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of a relation's filled splits, or zeros. Grid (ceil(K * W / BLOCK), R)."""
    relation = tl.program_id(1)
    part = parts_ptr + 4 * relation
    first = tl.load(part + 1).to(tl.int64)
    splits = tl.minimum(tl.cdiv(tl.load(counts_ptr + tl.load(part)), chunk), tl.load(part + 2))
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < K * W
    element_ptr = partial_ptr + (element // W * P + element % W + tl.load(part + 3))
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.range(0, splits, loop_unroll_factor=4):
        total += tl.load(element_ptr + (first + split) * (K * P), mask=inside, other=0.0)
    tl.store(sums_ptr + relation.to(tl.int64) * (K * W) + element, total.to(sums_ptr.dtype.element_ty), mask=inside)
