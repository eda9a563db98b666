# mypy: allow-untyped-defs
"""Triton kernel of the target terms: every target of a type times the vectors of all relations into the type.

x is read once: with 2,048 seeds, the first convolution reads about 400,000 rows of 1 KB, 0.1 ms at 4 TB/s on an H200.
The vectors are fp32. For inputs of at most 16 bits, a vector is split into the sum of two parts in the product's
dtype, which preserves at least 16 bits of it. The second product costs little, because tensor cores are not busy.

Legend: N nodes, T pairs of relation and target, K inputs, A heads, R relations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.rgat.ops.projection.kernels import FIELDS, TARGETS, brought, columns_into, own_tile


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
    place = tl.load(relations_ptr + relation * FIELDS + TARGETS, mask=known, other=0).to(tl.int64)
    place = (place[None, :] + target[:, None]) * A + head[None, :]
    tl.store(term_ptr + place, term, mask=known[None, :] & (target < count)[:, None])
