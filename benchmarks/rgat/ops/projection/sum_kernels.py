# mypy: allow-untyped-defs
"""Triton kernels of the gradients that are sums over rows or targets: those of the weights and of v.

A relation may have a million rows, with a result of 1024 x 512. The rows are therefore cut into splits: a program
computes one tile of the result over one split, and a second kernel adds the splits in order. Writing and reading the
partial sums of about 80 splits of 2 MB takes 0.08 ms on an H200, compared with 4 ms for the products. Atomics could
not save more, and would make results irreproducible.

Neighbouring programs have tiles of the same split, and read the same rows.

Legend: N nodes, M rows, K inputs, D outputs, A heads, R relations, S splits, T pairs of relation and target.
"""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.rgat.ops.projection.kernels import (
    FIELDS,
    ROWS,
    ROWS_OF_LEVEL,
    SOURCES,
    TARGETS,
    brought,
    columns_into,
    own_tile,
)
from benchmarks.rgat.ops.projection.term_kernels import add_product


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
    place = (split.to(tl.int64) * K + depth)[:, None] * D + column[None, :]
    tl.store(partial_ptr + place, dw, mask=(depth < K)[:, None] & (column < D)[None, :])


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
        place = (start[None, :] + target[:, None]) * A + head[None, :]
        dterm = tl.load(dterm_ptr + place, mask=(target < count)[:, None] & known[None, :], other=0.0)
        dv = add_product(tl.trans(brought(x, PRODUCT)), dterm, dv, PRECISION)
    place = (split.to(tl.int64) * K + depth)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(partial_ptr + place, dv, mask=(depth < K)[:, None])


@triton.jit(do_not_specialize_on_alignment=["counts_ptr"])
def projection_sums_kernel(
    partial_ptr,  # (S, K, P) fp32
    sums_ptr,  # (R, K, W)
    counts_ptr,  # counts of relations or types
    parts_ptr,  # (R, 4): index of the count, first split, number of splits, first of the W columns of P
    chunk,
    K: tl.constexpr, P: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a relation's filled splits. Grid (ceil(K * W / BLOCK), R)."""
    relation = tl.program_id(1)
    part = parts_ptr + 4 * relation
    first = tl.load(part + 1).to(tl.int64)
    splits = tl.minimum(tl.cdiv(tl.load(counts_ptr + tl.load(part)), chunk), tl.load(part + 2))
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < K * W
    places = partial_ptr + (element // W * P + element % W + tl.load(part + 3))
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.range(0, splits, loop_unroll_factor=4):
        total += tl.load(places + (first + split) * (K * P), mask=inside, other=0.0)
    tl.store(sums_ptr + relation.to(tl.int64) * (K * W) + element, total.to(sums_ptr.dtype.element_ty), mask=inside)
