# mypy: allow-untyped-defs
"""Triton kernels of the backward pass over targets: gradient of the sums, and of the attention weights.

Let g be the gradient of a target's sum and, per head, a = g . z[row(e)]. The logit of an edge before the leaky ReLU
has the gradient alpha_e (a_e - sum alpha a), times ``slope`` if it was negative. A program has some targets of one
relation. Per edge, it stores attention weight and gradient of the logit side by side (32 bytes with four heads),
which is all that the pass over rows needs. z is read from memory once; for targets with more than ``EDGES`` edges a
second time, from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.rgat.ops.edge_attention.kernels import LOG2_E, leaky, load_row, load_rows, record_of
from common.ops.dropout.kernels import keep_of_rows, mask_keys


@triton.jit(do_not_specialize=["site"])
def edge_attention_gradient_kernel(
    dout_ptr,  # (P, D)
    out_ptr,  # (P, D), if ACTIVATION
    gradient_ptr,  # (P, D), written if ACTIVATION or THRESHOLD
    partial_ptr,  # (programs, D) fp32
    counts_ptr,  # of the block
    kinds_ptr,  # see ByKind
    seed_ptr,  # 0-d int64, if THRESHOLD
    site, activation_slope,
    D: tl.constexpr, BLOCK_D: tl.constexpr, KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr,
    NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the sums over relations, and each program's partial column sums of it.

    Grid (programs,), each with NODES nodes of a type, BLOCK at a time.
    """
    program = tl.program_id(0)
    kind_ptr = kinds_ptr + record_of(program, kinds_ptr, KINDS, 7) * 7
    first = (program - tl.load(kind_ptr)) * NODES
    first_row = tl.load(kind_ptr + 1)
    end = tl.minimum(first + NODES, tl.load(counts_ptr + tl.load(kind_ptr + 2)))
    column = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if THRESHOLD > 0:
        key, second_key = mask_keys(seed_ptr, site + tl.load(kind_ptr + 6))
    for start in range(first, end, BLOCK):
        node = start + tl.arange(0, BLOCK)
        row = (first_row + node).to(tl.int64)
        place = row[:, None] * D + column[None, :]
        mask = (node < end)[:, None] & (column < D)[None, :]
        gradient = tl.load(dout_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if THRESHOLD > 0:
            keep = keep_of_rows((node.to(tl.int64) * D).to(tl.uint32), BLOCK_D, D % 2 == 0, key, second_key, THRESHOLD)
            gradient = tl.where(keep, gradient * INVERSE_KEEP, 0.0)
        if ACTIVATION:  # the sign of dropped elements is lost, but their gradient is 0
            out = tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.where(out > 0, gradient, gradient * activation_slope)
        if ACTIVATION or THRESHOLD > 0:
            tl.store(gradient_ptr + place, gradient.to(gradient_ptr.dtype.element_ty), mask=mask)
        total += gradient
    tl.store(partial_ptr + program.to(tl.int64) * D + column, tl.sum(total, 0), mask=column < D)


@triton.jit
def edge_attention_sums_kernel(
    partial_ptr,  # (programs, D) fp32
    sums_ptr,  # (R, D) fp32
    partials_ptr,  # see ByKind
    D,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the partial results of each relation's programs in a fixed order. Grid (R, ceil(D / BLOCK_D))."""
    relation = tl.program_id(0)
    record_ptr = partials_ptr + relation * 3
    first = tl.load(record_ptr).to(tl.int64)
    distance = tl.load(record_ptr + 1).to(tl.int64)
    count = tl.load(record_ptr + 2)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in tl.range(0, count, ROWS, loop_unroll_factor=4):
        index = start + tl.arange(0, ROWS)
        place = (first + index * distance)[:, None] * D + column[None, :]
        total += tl.load(partial_ptr + place, mask=(index < count)[:, None] & (column < D)[None, :], other=0.0)
    tl.store(sums_ptr + relation * D + column, tl.sum(total, 0), mask=column < D)


@triton.jit
def _shares(
    gradient, target_term, log_sum, z_ptr, source_term_ptr, row, exists, slope,
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return, for edges of a target: rows of z, attention weights, their gradients, and slopes of the logits."""
    term_place = row.to(tl.int64)[:, None] * A + tl.arange(0, A)[None, :]
    source_term = tl.load(source_term_ptr + term_place, mask=exists[:, None], other=0.0)
    z = load_rows(z_ptr, row, exists, A, WIDTH, BLOCK_D, "").to(tl.float32)
    logit = source_term + target_term[None, :]
    share = tl.exp2((leaky(logit, slope) - log_sum[None, :]) * LOG2_E)
    share = tl.where(exists[:, None], share, 0.0)
    dshare = tl.sum(z * gradient[None, :, :], 2)
    return z, share, dshare, tl.where(logit > 0, 1.0, slope)


@triton.jit
def _dlogits(z, share, dshare, factor, mean, shares_ptr, first, end, A: tl.constexpr, EDGES: tl.constexpr):
    """Store weights and gradients of logits; return the latter summed over edges, alone and times z."""
    dlogit = share * (dshare - mean[None, :]) * factor
    edge = first + tl.arange(0, EDGES)
    place = edge[:, None] * (2 * A) + tl.arange(0, A)[None, :]
    mask = (edge < end)[:, None]
    tl.store(shares_ptr + place, share, mask=mask)
    tl.store(shares_ptr + place + A, dlogit, mask=mask)
    return tl.sum(dlogit, 0), tl.sum(dlogit[:, :, None] * z, 0)


@triton.jit
def edge_attention_targets_kernel(
    gradient_ptr,  # (P, D), of the sums over relations
    z_ptr,  # (M, D)
    source_term_ptr,  # (M, A) fp32
    target_term_ptr,  # (T, A) fp32
    log_sum_ptr,  # (T, A) fp32
    dtarget_term_ptr,  # (T, A) fp32
    shares_ptr,  # (edges, 2, A) fp32: attention weight and gradient of the logit
    partial_ptr,  # (programs, D) fp32: sums of the logits' gradients times z
    counts_ptr, indptr_ptr, edge_row_ptr,  # of the block
    kinds_ptr, relations_ptr,  # see ByKind
    edges_place,  # offset of the level's edge counts in counts
    slope,
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, KINDS: tl.constexpr,
    TARGETS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Compute gradients of target terms and logits. Grid (programs,), each with TARGETS targets of a relation.

    Relations with the same targets are neighbours, so that the targets' gradients stay in the cache.
    """
    program = tl.program_id(0)
    kind_ptr = kinds_ptr + record_of(program, kinds_ptr, KINDS, 7) * 7
    relations = tl.load(kind_ptr + 5)
    index = program - tl.load(kind_ptr)
    first = index // relations * TARGETS
    last = tl.minimum(first + TARGETS, tl.load(kind_ptr + 3))
    count = tl.load(counts_ptr + tl.load(kind_ptr + 2))
    first_node = tl.load(kind_ptr + 1)
    relation_ptr = relations_ptr + (tl.load(kind_ptr + 4) + index % relations) * 5
    relation = tl.load(relation_ptr)
    indptr_ptr += tl.load(relation_ptr + 1)
    first_edge = tl.load(relation_ptr + 2)
    row_ptr = edge_row_ptr + first_edge
    shares_ptr += first_edge.to(tl.int64) * (2 * A)
    first_row = tl.load(relation_ptr + 3)
    first_target = tl.load(relation_ptr + 4)
    edges = tl.load(counts_ptr + edges_place + relation)
    head = tl.arange(0, A)
    slot = tl.arange(0, EDGES)
    total = tl.zeros((A, BLOCK_D), tl.float32)
    stop = tl.minimum(last, count)
    begin = tl.load(indptr_ptr + first, mask=first < stop, other=0)
    end = tl.load(indptr_ptr + first + 1, mask=first < stop, other=0)
    row = tl.load(row_ptr + begin + slot, mask=begin + slot < edges, other=0)
    for node in range(first, stop):
        # Prefetch for the next target, whose edges follow directly.
        next_end = tl.load(indptr_ptr + node + 2, mask=node + 1 < stop, other=0)
        next_row = tl.load(row_ptr + end + slot, mask=end + slot < edges, other=0)
        place = (first_target + node).to(tl.int64) * A + head
        dtarget_term = tl.zeros((A,), tl.float32)
        if begin < end:
            gradient = load_row(gradient_ptr, first_node + node, A, WIDTH, BLOCK_D)
            target_term = tl.load(target_term_ptr + place)
            log_sum = tl.load(log_sum_ptr + place)
            z, share, dshare, factor = _shares(
                gradient, target_term, log_sum, z_ptr, source_term_ptr, first_row + row, begin + slot < end, slope,
                A, WIDTH, BLOCK_D,
            )  # fmt: skip
            mean = tl.sum(share * dshare, 0)
            for start in range(begin + EDGES, end, EDGES):
                exists = start + slot < end
                row = tl.load(row_ptr + start + slot, mask=exists, other=0)
                _, more, dmore, _ = _shares(
                    gradient, target_term, log_sum, z_ptr, source_term_ptr, first_row + row, exists, slope,
                    A, WIDTH, BLOCK_D,
                )  # fmt: skip
                mean += tl.sum(more * dmore, 0)
            dtarget_term, dsource = _dlogits(z, share, dshare, factor, mean, shares_ptr, begin, end, A, EDGES)
            total += dsource
            for start in range(begin + EDGES, end, EDGES):
                exists = start + slot < end
                row = tl.load(row_ptr + start + slot, mask=exists, other=0)
                z, share, dshare, factor = _shares(
                    gradient, target_term, log_sum, z_ptr, source_term_ptr, first_row + row, exists, slope,
                    A, WIDTH, BLOCK_D,
                )  # fmt: skip
                dmore, dsource = _dlogits(z, share, dshare, factor, mean, shares_ptr, start, end, A, EDGES)
                dtarget_term += dmore
                total += dsource
        tl.store(dtarget_term_ptr + place, dtarget_term)
        begin = end
        end = next_end
        row = next_row
    for node in range(tl.maximum(first, stop), last):
        place = (first_target + node).to(tl.int64) * A + head
        tl.store(dtarget_term_ptr + place, tl.zeros((A,), tl.float32))
    column = tl.arange(0, BLOCK_D)
    offset = program.to(tl.int64) * (A * WIDTH) + head[:, None] * WIDTH + column[None, :]
    tl.store(partial_ptr + offset, total, mask=(column < WIDTH)[None, :])
