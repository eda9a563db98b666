# mypy: allow-untyped-defs
"""Triton kernel of the forward pass of edge attention, and helpers that the backward kernels share.

A program computes one target of one type. It loops over the relations into the type and over their edges, ``EDGES``
at a time, with rows of z in registers as [EDGES, A, d]; maximum, denominator and weighted sum of the softmax are
updated online per head. Biases, activation and dropout are fused, so each result is written once.

The kernel is bound by memory bandwidth: with 2,048 seeds, the first convolution reads 3.7 million rows of 512 bf16,
3.8 GB, which takes 0.9 ms on an H200 at 4.3 TB/s. Terms, indices and results add only about 0.8 GB.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.dropout.triton import keep_of_rows, mask_keys

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def record_of(program, table_ptr, RECORDS: tl.constexpr, LENGTH: tl.constexpr):
    """Return the index of the record of ``program``: the last record whose first program is not greater."""
    found = 0
    for record in tl.static_range(1, RECORDS):
        found = tl.where(program >= tl.load(table_ptr + record * LENGTH), record, found)
    return found


@triton.jit
def leaky(x, slope):
    """Return the leaky ReLU of x, with a slope of at most 1.

    Written without a product that the compiler could fuse with a following difference, so that the logit of a
    target's only edge equals its ``log_sum`` in every kernel.
    """
    return tl.maximum(x, x * slope)


@triton.jit
def load_rows(
    pointer, row, exists, A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, EVICT: tl.constexpr
):  # fmt: skip
    """Return rows of A heads in their stored dtype, [rows, A, BLOCK_D]; zeros where ``exists`` is false."""
    column = tl.arange(0, BLOCK_D)
    position = tl.arange(0, A)[:, None] * WIDTH + column[None, :]
    offset = row.to(tl.int64)[:, None, None] * (A * WIDTH) + position[None, :, :]
    mask = exists[:, None, None] & (column < WIDTH)[None, None, :]
    return tl.load(pointer + offset, mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def load_row(pointer, row, A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a row of A heads, fp32 [A, BLOCK_D]."""
    column = tl.arange(0, BLOCK_D)
    offset = row.to(tl.int64) * (A * WIDTH) + tl.arange(0, A)[:, None] * WIDTH + column[None, :]
    return tl.load(pointer + offset, mask=(column < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_row(pointer, row, value, A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    offset = row.to(tl.int64) * (A * WIDTH) + tl.arange(0, A)[:, None] * WIDTH + column[None, :]
    tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=(column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["site"])
def edge_attention_forward_kernel(
    z_ptr,  # (M, D)
    source_term_ptr,  # (M, A) fp32
    target_term_ptr,  # (T, A) fp32
    bias_ptr,  # (R, D)
    out_ptr,  # (P, D)
    log_sum_ptr,  # (T, A) fp32
    counts_ptr, indptr_ptr, edge_row_ptr,  # of the block
    kinds_ptr, relations_ptr,  # see ByKind
    seed_ptr,  # 0-d int64, if THRESHOLD
    site, slope, activation_slope,
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Write the result and ``log_sum`` of one target per program. Grid (P,)."""
    program = tl.program_id(0)
    kind_ptr = kinds_ptr + record_of(program, kinds_ptr, KINDS, 7) * 7
    node = program - tl.load(kind_ptr)
    out_row = tl.load(kind_ptr + 1) + node
    head = tl.arange(0, A)
    slot = tl.arange(0, EDGES)
    total = tl.zeros((A, BLOCK_D), tl.float32)
    if node < tl.load(counts_ptr + tl.load(kind_ptr + 2)):
        first_relation = tl.load(kind_ptr + 4)
        for relation in range(first_relation, first_relation + tl.load(kind_ptr + 5)):
            relation_ptr = relations_ptr + relation * 5
            first_edge_ptr = indptr_ptr + tl.load(relation_ptr + 1) + node
            begin = tl.load(first_edge_ptr)
            end = tl.load(first_edge_ptr + 1)
            total += load_row(bias_ptr, tl.load(relation_ptr), A, WIDTH, BLOCK_D)
            if begin < end:
                first_edge = tl.load(relation_ptr + 2)
                first_row = tl.load(relation_ptr + 3)
                offset = (tl.load(relation_ptr + 4) + node).to(tl.int64) * A + head
                target_term = tl.load(target_term_ptr + offset)
                highest = tl.full((A,), float("-inf"), tl.float32)
                denominator = tl.zeros((A,), tl.float32)
                weighted = tl.zeros((A, BLOCK_D), tl.float32)
                for first in range(begin, end, EDGES):
                    exists = first + slot < end
                    row = first_row + tl.load(edge_row_ptr + first_edge + first + slot, mask=exists, other=0)
                    term_offset = row.to(tl.int64)[:, None] * A + head[None, :]
                    source_term = tl.load(source_term_ptr + term_offset, mask=exists[:, None], other=0.0)
                    z = load_rows(z_ptr, row, exists, A, WIDTH, BLOCK_D, "evict_first").to(tl.float32)
                    logit = leaky(source_term + target_term[None, :], slope)
                    logit = tl.where(exists[:, None], logit, float("-inf"))
                    higher = tl.maximum(highest, tl.max(logit, 0))
                    shrink = tl.exp2((highest - higher) * LOG2_E)
                    share = tl.exp2((logit - higher[None, :]) * LOG2_E)
                    denominator = denominator * shrink + tl.sum(share, 0)
                    weighted = weighted * shrink[:, None] + tl.sum(share[:, :, None] * z, 0)
                    highest = higher
                total += weighted / denominator[:, None]
                tl.store(log_sum_ptr + offset, highest + tl.log(denominator))
        if ACTIVATION:
            total = leaky(total, activation_slope)
        if THRESHOLD > 0:
            key, second_key = mask_keys(seed_ptr, site + tl.load(kind_ptr + 6))
            start = (node.to(tl.int64) * (A * WIDTH) + head * WIDTH).to(tl.uint32)
            keep = keep_of_rows(start, BLOCK_D, WIDTH % 2 == 0, key, second_key, THRESHOLD)
            total = tl.where(keep, total * INVERSE_KEEP, 0.0)
    store_row(out_ptr, out_row, total, A, WIDTH, BLOCK_D)
