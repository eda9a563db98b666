# mypy: allow-untyped-defs
"""Triton kernels of the backward pass of edge attention.

Over targets: let g be the gradient of a target's sum and, per head, a = g . z[row(e)]. The logit of an edge before the
leaky ReLU has the gradient alpha_e (a_e - sum alpha a), times ``slope`` if it was negative. A program has some targets
of one relation. Per edge, it stores attention weight and gradient of the logit side by side (32 bytes with four
heads), which is all that the pass over rows needs. z is read from memory once; for targets with more than ``EDGES``
edges a second time, from the cache.

Over rows: dz is computed from the transposed index, without atomics. A row's gradient is the sum over its edges of
attention weight times gradient of the target, plus the attention vector times the sum of the gradients of the logits.
Most rows have one or two edges, some have tens of thousands (a common topic), so the entries of ``row_edges`` are cut
into chunks of ``CHUNK``, independently of row boundaries:

1. the first kernel sums the entries at the start of each chunk that continue an earlier row; 2. the second adds up
these sums for each row that has several; 3. the third sums its rows' entries up to the end of the chunk in which they
begin, and adds the result of the second.

The order of all sums is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.rgat.ops.edge_attention.kernels import LOG2_E, leaky, load_row, load_rows, record_of, store_row
from common.ops.dropout.triton import keep_of_rows, mask_keys


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
        offset = row[:, None] * D + column[None, :]
        mask = (node < end)[:, None] & (column < D)[None, :]
        gradient = tl.load(dout_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if THRESHOLD > 0:
            keep = keep_of_rows((node.to(tl.int64) * D).to(tl.uint32), BLOCK_D, D % 2 == 0, key, second_key, THRESHOLD)
            gradient = tl.where(keep, gradient * INVERSE_KEEP, 0.0)
        if ACTIVATION:  # the sign of dropped elements is lost, but their gradient is 0
            out = tl.load(out_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.where(out > 0, gradient, gradient * activation_slope)
        if ACTIVATION or THRESHOLD > 0:
            tl.store(gradient_ptr + offset, gradient.to(gradient_ptr.dtype.element_ty), mask=mask)
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
    """Write the sums of the partial results of a relation's programs. Grid (R, ceil(D / BLOCK_D))."""
    relation = tl.program_id(0)
    record_ptr = partials_ptr + relation * 3
    first = tl.load(record_ptr).to(tl.int64)
    distance = tl.load(record_ptr + 1).to(tl.int64)
    count = tl.load(record_ptr + 2)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in tl.range(0, count, ROWS, loop_unroll_factor=4):
        index = start + tl.arange(0, ROWS)
        offset = (first + index * distance)[:, None] * D + column[None, :]
        total += tl.load(partial_ptr + offset, mask=(index < count)[:, None] & (column < D)[None, :], other=0.0)
    tl.store(sums_ptr + relation * D + column, tl.sum(total, 0), mask=column < D)


@triton.jit
def _shares(
    gradient, target_term, log_sum, z_ptr, source_term_ptr, row, exists, slope,
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return, for edges of a target: rows of z, attention weights, their gradients, and slopes of the logits."""
    term_offset = row.to(tl.int64)[:, None] * A + tl.arange(0, A)[None, :]
    source_term = tl.load(source_term_ptr + term_offset, mask=exists[:, None], other=0.0)
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
    offset = edge[:, None] * (2 * A) + tl.arange(0, A)[None, :]
    mask = (edge < end)[:, None]
    tl.store(shares_ptr + offset, share, mask=mask)
    tl.store(shares_ptr + offset + A, dlogit, mask=mask)
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
    edges_offset,  # offset of the level's edge counts in counts
    slope,
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, KINDS: tl.constexpr,
    TARGETS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Write target terms' gradients, ``shares`` and partial sums. Grid (programs,), each TARGETS targets of a relation.

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
    edges = tl.load(counts_ptr + edges_offset + relation)
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
        position = (first_target + node).to(tl.int64) * A + head
        dtarget_term = tl.zeros((A,), tl.float32)
        if begin < end:
            gradient = load_row(gradient_ptr, first_node + node, A, WIDTH, BLOCK_D)
            target_term = tl.load(target_term_ptr + position)
            log_sum = tl.load(log_sum_ptr + position)
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
        tl.store(dtarget_term_ptr + position, dtarget_term)
        begin = end
        end = next_end
        row = next_row
    for node in range(tl.maximum(first, stop), last):
        position = (first_target + node).to(tl.int64) * A + head
        tl.store(dtarget_term_ptr + position, tl.zeros((A,), tl.float32))
    column = tl.arange(0, BLOCK_D)
    offset = program.to(tl.int64) * (A * WIDTH) + head[:, None] * WIDTH + column[None, :]
    tl.store(partial_ptr + offset, total, mask=(column < WIDTH)[None, :])


@triton.jit
def _shares_of(shares_ptr, edge, exists, A: tl.constexpr):
    """Return attention weights and gradients of logits of some edges, [edges, A] each."""
    offset = edge.to(tl.int64)[:, None] * (2 * A) + tl.arange(0, A)[None, :]
    share = tl.load(shares_ptr + offset, mask=exists[:, None], other=0.0)
    return share, tl.load(shares_ptr + offset + A, mask=exists[:, None], other=0.0)


@triton.jit
def _entries(
    shares_ptr, row_edges_ptr, edge_target_ptr, first_edge, first_node, entry, end, edges, A: tl.constexpr
):  # fmt: skip
    """Return, for entries before ``end``: output nodes, weights, gradients of logits, and which exist at the level."""
    edge = tl.load(row_edges_ptr + entry, mask=entry < end, other=edges)
    exists = edge < edges
    node = first_node + tl.load(edge_target_ptr + edge, mask=exists, other=0)
    share, dlogit = _shares_of(shares_ptr, first_edge + edge, exists, A)
    return node, share, dlogit, exists


@triton.jit
def _chunks_of(program, record_ptr, counts_ptr, row_indptr_ptr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Return a program's first chunk and the end (exclusive) of its chunks with entries of the level's rows."""
    entries = tl.load(row_indptr_ptr + tl.load(record_ptr + 3) + tl.load(counts_ptr + tl.load(record_ptr + 7)))
    first = (program - tl.load(record_ptr)) * GROUP
    return first, tl.minimum(first + GROUP, (entries + CHUNK - 1) // CHUNK)


@triton.jit
def edge_attention_chunks_kernel(
    gradient_ptr,  # (P, D)
    shares_ptr,  # (edges, 2, A) fp32
    partial_ptr,  # (chunks, D) fp32
    partial_term_ptr,  # (chunks, A) fp32
    behind_ptr,  # (chunks,) int32: number of further chunks of a row, stored at the first of them; else 0
    counts_ptr, row_indptr_ptr, edge_row_ptr, edge_target_ptr, row_edges_ptr,  # of the block
    relations_ptr,  # see ByRelation
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, RELATIONS: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Write the sum of a chunk's first entries that continue a row. Grid (programs,), each with GROUP chunks."""
    program = tl.program_id(0)
    record_ptr = relations_ptr + record_of(program, relations_ptr, RELATIONS, 9) * 9
    first_chunk, last_chunk = _chunks_of(program, record_ptr, counts_ptr, row_indptr_ptr, CHUNK, GROUP)
    first_edge = tl.load(record_ptr + 2)
    row_indptr_ptr += tl.load(record_ptr + 3)
    before = tl.load(record_ptr + 5)
    first_node = tl.load(record_ptr + 6)
    edges = tl.load(counts_ptr + tl.load(record_ptr + 8))
    for chunk in range(first_chunk, last_chunk):
        first = chunk * CHUNK
        edge = tl.load(row_edges_ptr + first_edge + first)
        row = tl.load(edge_row_ptr + first_edge + edge)
        begin = tl.load(row_indptr_ptr + row)
        end = tl.load(row_indptr_ptr + row + 1)
        behind = 0
        if (begin < first) & (edge < edges):
            if begin >= first - CHUNK:
                behind = (end - first + CHUNK - 1) // CHUNK
            last = tl.minimum(end, first + CHUNK)
            total = tl.zeros((A, BLOCK_D), tl.float32)
            total_term = tl.zeros((A,), tl.float32)
            for start in range(first, last, EDGES):
                node, share, dlogit, exists = _entries(
                    shares_ptr, row_edges_ptr + first_edge, edge_target_ptr + first_edge, first_edge, first_node,
                    start + tl.arange(0, EDGES), last, edges, A,
                )  # fmt: skip
                gradient = load_rows(gradient_ptr, node, exists, A, WIDTH, BLOCK_D, "").to(tl.float32)
                total += tl.sum(share[:, :, None] * gradient, 0)
                total_term += tl.sum(dlogit, 0)
            store_row(partial_ptr, before + chunk, total, A, WIDTH, BLOCK_D)
            tl.store(partial_term_ptr + (before + chunk) * A + tl.arange(0, A), total_term)
        tl.store(behind_ptr + before + chunk, behind)


@triton.jit
def edge_attention_long_rows_kernel(
    partial_ptr,  # (chunks, D) fp32
    partial_term_ptr,  # (chunks, A) fp32
    behind_ptr,  # (chunks,) int32
    counts_ptr, row_indptr_ptr, row_edges_ptr,  # of the block
    relations_ptr,  # see ByRelation
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, RELATIONS: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Overwrite the partial sum of a row's first further chunk by the sum over all of them, CHUNKS at a time.

    Grid (programs, A): each program has one head of GROUP chunks.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    record_ptr = relations_ptr + record_of(program, relations_ptr, RELATIONS, 9) * 9
    first_chunk, last_chunk = _chunks_of(program, record_ptr, counts_ptr, row_indptr_ptr, CHUNK, GROUP)
    row_edges_ptr += tl.load(record_ptr + 2)
    before = tl.load(record_ptr + 5)
    edges = tl.load(counts_ptr + tl.load(record_ptr + 8))
    column = tl.arange(0, BLOCK_D)
    index = first_chunk + tl.arange(0, GROUP)
    most = tl.max(tl.load(behind_ptr + before + index, mask=index < last_chunk, other=0), 0)
    for chunk in range(first_chunk, tl.where(most > 1, last_chunk, first_chunk)):
        behind = tl.load(behind_ptr + before + chunk)
        if behind > 1:
            total = tl.zeros((BLOCK_D,), tl.float32)
            total_term = tl.zeros((), tl.float32)
            start = chunk
            while start < chunk + behind:
                index = start + tl.arange(0, CHUNKS)
                edge = tl.load(row_edges_ptr + index * CHUNK, mask=index < chunk + behind, other=edges)
                exists = edge < edges
                offset = (before + index).to(tl.int64) * A + head
                mask = exists[:, None] & (column < WIDTH)[None, :]
                total += tl.sum(
                    tl.load(partial_ptr + offset[:, None] * WIDTH + column[None, :], mask=mask, other=0.0), 0
                )
                total_term += tl.sum(tl.load(partial_term_ptr + offset, mask=exists, other=0.0), 0)
                start += CHUNKS
                if tl.max(edge, 0) >= edges:  # a row's edges ascend, so all that follow are of later hops, too
                    start = chunk + behind
            tl.debug_barrier()  # all threads must have read before one overwrites
            offset = (before + chunk).to(tl.int64) * A + head
            tl.store(partial_ptr + offset * WIDTH + column, total, mask=column < WIDTH)
            tl.store(partial_term_ptr + offset, total_term)


@triton.jit
def edge_attention_rows_kernel(
    gradient_ptr,  # (P, D)
    shares_ptr,  # (edges, 2, A) fp32
    att_source_ptr,  # (R, D)
    partial_ptr,  # (chunks, D) fp32, sums of entries that continue a row
    partial_term_ptr,  # (chunks, A) fp32
    dz_ptr,  # (M, D)
    counts_ptr, row_indptr_ptr, edge_target_ptr, row_edges_ptr,  # of the block
    relations_ptr,  # see ByRelation
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, RELATIONS: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Write dz of ROWS rows of a relation per program, EDGES edges of each at a time. Grid (programs,)."""
    program = tl.program_id(0)
    record_ptr = relations_ptr + record_of(program, relations_ptr, RELATIONS, 9) * 9
    rows = tl.load(counts_ptr + tl.load(record_ptr + 7))
    first_own = (program - tl.load(record_ptr)) * ROWS
    if first_own < rows:
        relation = tl.load(record_ptr + 1)
        first_edge = tl.load(record_ptr + 2)
        row_indptr_ptr += tl.load(record_ptr + 3)
        row_edges_ptr += first_edge
        edge_target_ptr += first_edge
        first_row = tl.load(record_ptr + 4)
        before = tl.load(record_ptr + 5)
        first_node = tl.load(record_ptr + 6)
        edges = tl.load(counts_ptr + tl.load(record_ptr + 8))

        lane = tl.arange(0, ROWS * EDGES)
        own = first_own + lane // EDGES
        begin = tl.load(row_indptr_ptr + own, mask=own < rows, other=0)
        end = tl.load(row_indptr_ptr + own + 1, mask=own < rows, other=0)
        border = (begin // CHUNK + 1) * CHUNK
        entry = begin + lane % EDGES
        own_end = tl.minimum(end, border)
        total = tl.zeros((ROWS * EDGES, A, BLOCK_D), tl.float32)
        total_term = tl.zeros((ROWS * EDGES, A), tl.float32)
        node, share, dlogit, exists = _entries(
            shares_ptr, row_edges_ptr, edge_target_ptr, first_edge, first_node, entry, own_end, edges, A
        )
        for _ in range(0, tl.max(own_end - begin, 0), EDGES):
            gradient = load_rows(gradient_ptr, node, exists, A, WIDTH, BLOCK_D, "").to(tl.float32)
            entry += EDGES  # prefetch the next entries while the gradients load
            next_node, next_share, next_dlogit, exists = _entries(
                shares_ptr, row_edges_ptr, edge_target_ptr, first_edge, first_node, entry, own_end, edges, A
            )
            total += share[:, :, None] * gradient
            total_term += dlogit
            node = next_node
            share = next_share
            dlogit = next_dlogit

        goes_on = (end > border) & (lane % EDGES == 0)
        if tl.max(goes_on.to(tl.int32), 0) > 0:
            edge = tl.load(row_edges_ptr + border, mask=goes_on, other=edges)
            exists = edge < edges
            chunk = before + border // CHUNK
            total += load_rows(partial_ptr, chunk, exists, A, WIDTH, BLOCK_D, "")
            position = chunk[:, None] * A + tl.arange(0, A)[None, :]
            total_term += tl.load(partial_term_ptr + position, mask=exists[:, None], other=0.0)

        total = tl.sum(tl.reshape(total, (ROWS, EDGES, A, BLOCK_D)), 1)
        total_term = tl.sum(tl.reshape(total_term, (ROWS, EDGES, A)), 1)
        att_source = load_row(att_source_ptr, relation, A, WIDTH, BLOCK_D)
        total += total_term[:, :, None] * att_source[None, :, :]
        row = first_own + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK_D)
        position = tl.arange(0, A)[:, None] * WIDTH + column[None, :]
        offset = (first_row + row).to(tl.int64)[:, None, None] * (A * WIDTH) + position[None, :, :]
        mask = (row < rows)[:, None, None] & (column < WIDTH)[None, None, :]
        tl.store(dz_ptr + offset, total.to(dz_ptr.dtype.element_ty), mask=mask)
