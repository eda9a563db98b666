# mypy: allow-untyped-defs
"""Triton kernels that number the rows of a block, with one launch for all relations and hops.

They work like those of :mod:`benchmarks.rgat.ops.sample.kernels` and use the same tables; ``table_ptr`` has those of
all hops. The stamp of a row, one per relation and node, is the first edge with this node as source.
"""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.rgat.ops.sample.kernels import (
    EDGE_ROOM,
    EDGES,
    FIELDS,
    NODE_ROW,
    ROW_INDPTR,
    ROW_ROOM,
    ROW_STAMPS,
    ROWS,
    SOURCE,
    SOURCE_ROOM,
    STAMPS,
    UNSEEN,
    before,
    edges_within,
    items_of,
    nodes_within,
)


@triton.jit
def _room_at_hop(table_ptr, counts_ptr, field: tl.constexpr, relation, item, R, T: tl.constexpr, H: tl.constexpr):
    """Return a table field of the hop to which each edge belongs; ``table_ptr`` has the tables of all hops."""
    room = tl.zeros_like(item) + tl.load(table_ptr + (H - 1) * FIELDS * R + field * R + relation).to(tl.int32)
    for back in tl.static_range(2, H + 1):
        end = edges_within(counts_ptr, H - back + 1, relation, R, T, H)
        room = tl.where(
            item < end, tl.load(table_ptr + (H - back) * FIELDS * R + field * R + relation).to(tl.int32), room
        )
    return room


@triton.jit
def sample_source_kernel(
    programs_ptr, table_ptr, counts_ptr, stamps_ptr,
    source_ptr,  # nodes of the graph, replaced by numbers in the block
    row_stamps_ptr,  # for all relations and nodes of their source types
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace sources by their numbers, and write the edges' positions to the stamps of rows."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    last_ptr = table_ptr + (H - 1) * FIELDS * R
    count = edges_within(counts_ptr, H, relation, R, T, H)
    if first < count:
        there = item < count
        source_ptr += tl.load(last_ptr + EDGES * R + relation)
        source = tl.load(source_ptr + item, mask=there, other=0).to(tl.int64)
        stamp = tl.load(stamps_ptr + tl.load(last_ptr + STAMPS * R + relation) + source, mask=there, other=-1)
        last = _room_at_hop(table_ptr, counts_ptr, SOURCE_ROOM, relation, item, R, T, H) - 1
        number = tl.where(stamp < 0, tl.minimum(-1 - stamp, last), last)
        tl.store(source_ptr + item, number, mask=there)
        row_stamps_ptr += tl.load(last_ptr + ROW_STAMPS * R + relation)
        known = tl.load(row_stamps_ptr + number, mask=there, other=-1)
        tl.atomic_min(row_stamps_ptr + number, item, mask=there & (item < known), sem="relaxed")


@triton.jit
def sample_row_flag_kernel(
    programs_ptr, table_ptr, counts_ptr, source_ptr, row_stamps_ptr,
    opening_ptr,  # for each edge of the block: the first edge of its row
    flag_ptr,  # for each edge of the block: 1 if it opens a row
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Flag the edges that are the first of their row."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    last_ptr = table_ptr + (H - 1) * FIELDS * R
    count = edges_within(counts_ptr, H, relation, R, T, H)
    start = tl.load(last_ptr + EDGES * R + relation)
    flag = tl.zeros((BLOCK,), tl.int32)
    if first < count:
        there = item < count
        source = tl.load(source_ptr + start + item, mask=there, other=0)
        row_stamps_ptr += tl.load(last_ptr + ROW_STAMPS * R + relation)
        opening = tl.load(row_stamps_ptr + source, mask=there, other=-1)
        tl.store(opening_ptr + start + item, opening, mask=there)
        flag = (opening == item).to(tl.int32)
    tl.store(flag_ptr + start + item, flag, mask=item < tl.load(last_ptr + EDGE_ROOM * R + relation))


@triton.jit
def sample_row_kernel(
    programs_ptr, table_ptr, counts_ptr, source_ptr, opening_ptr,
    sums_ptr,  # inclusive sums of the flags
    edge_row_ptr, rows_ptr,
    key_ptr,  # for each edge of the block: its row in ``row_indptr``; unfilled edges sort after their relation's rows
    last_count,
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number the rows, and count them."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    last_ptr = table_ptr + (H - 1) * FIELDS * R
    count = edges_within(counts_ptr, H, relation, R, T, H)
    start = tl.load(last_ptr + EDGES * R + relation)
    others = before(sums_ptr, start)
    most = tl.load(last_ptr + ROW_ROOM * R + relation).to(tl.int32)
    key = tl.zeros((BLOCK,), tl.int32) + most
    if first < count:
        there = item < count
        opening = tl.load(opening_ptr + start + item, mask=there, other=0)
        number = tl.load(sums_ptr + start + opening, mask=there, other=1) - 1 - others
        room = _room_at_hop(table_ptr, counts_ptr, ROW_ROOM, relation, item, R, T, H)
        row = tl.minimum(number, room - 1)
        tl.store(edge_row_ptr + start + item, row, mask=there)
        opens = there & (opening == item) & (number < most)
        source = tl.load(source_ptr + start + item, mask=opens, other=0)
        tl.store(rows_ptr + tl.load(last_ptr + ROWS * R + relation) + number, source, mask=opens)
        key = tl.where(there, row, key)
    key += tl.load(last_ptr + ROW_INDPTR * R + relation).to(tl.int32)
    tl.store(key_ptr + start + item, key, mask=item < tl.load(last_ptr + EDGE_ROOM * R + relation))
    if first == 0:
        for hop in tl.static_range(H):
            end = edges_within(counts_ptr, hop + 1, relation, R, T, H)
            rows = before(sums_ptr, start + end) - others
            room = tl.load(table_ptr + hop * FIELDS * R + ROW_ROOM * R + relation).to(tl.int32)
            tl.store(counts_ptr + (H + 1) * T + (H + hop) * R + relation, tl.minimum(rows, room))
            if rows > room:
                tl.store(counts_ptr + last_count, 1)


@triton.jit
def sample_transpose_kernel(
    programs_ptr, table_ptr, counts_ptr,
    key_ptr,  # sorted
    order_ptr,  # (E,) int64: the edge of each key
    row_edges_ptr, row_indptr_ptr,
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the edges of each row, and the row's first entry. An empty row begins where the next one does."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    last_ptr = table_ptr + (H - 1) * FIELDS * R
    count = edges_within(counts_ptr, H, relation, R, T, H)
    start = tl.load(last_ptr + EDGES * R + relation)
    begin = tl.load(last_ptr + ROW_INDPTR * R + relation).to(tl.int32)
    rows = tl.load(counts_ptr + (H + 1) * T + (2 * H - 1) * R + relation)
    row_indptr_ptr += begin
    if first < count:
        there = item < count
        edge = tl.load(order_ptr + start + item, mask=there, other=0) - start
        tl.store(row_edges_ptr + start + item, edge.to(tl.int32), mask=there)
        row = tl.load(key_ptr + start + item, mask=there, other=0) - begin
        previous = tl.load(key_ptr + start + item - 1, mask=there & (item > 0), other=0) - begin
        previous = tl.where(item > 0, previous, -1)
        steps = tl.max(tl.where(there, row - previous, 0), 0)
        for step in range(steps):
            tl.store(row_indptr_ptr + row - step, item, mask=there & (row - step > previous))
        if first + BLOCK >= count:
            tail = tl.max(tl.where(there, row, -1), 0)
            for empty in range(tail + 1, rows + 1):
                tl.store(row_indptr_ptr + empty, count)
    if (first == 0) & (count == 0):
        tl.store(row_indptr_ptr, 0)


@triton.jit
def sample_node_row_kernel(
    programs_ptr, table_ptr, counts_ptr, row_stamps_ptr, sums_ptr, node_row_ptr,
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of each node within H - 1 hops, or -1. Items are nodes of the source type."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    last_ptr = table_ptr + (H - 1) * FIELDS * R
    inner = nodes_within(counts_ptr, H - 1, tl.load(last_ptr + SOURCE * R + relation), T)
    if first < inner:
        there = item < inner
        stamp = tl.load(row_stamps_ptr + tl.load(last_ptr + ROW_STAMPS * R + relation) + item, mask=there, other=UNSEEN)
        start = tl.load(last_ptr + EDGES * R + relation)
        has = there & (stamp != UNSEEN)
        row = tl.load(sums_ptr + start + stamp, mask=has, other=0) - 1 - before(sums_ptr, start)
        has &= row < tl.load(last_ptr + ROW_ROOM * R + relation)
        tl.store(node_row_ptr + tl.load(last_ptr + NODE_ROW * R + relation) + item, tl.where(has, row, -1), mask=there)
