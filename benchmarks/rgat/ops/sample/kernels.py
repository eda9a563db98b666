# mypy: allow-untyped-defs
"""Triton kernels that sample the edges and nodes of a hop, and number the rows of a block.

Each is one launch for all relations; those of rows are for all hops, and ``table_ptr`` then has the tables of all hops.
The stamp of a row, one per relation and node, is the first edge with this node as source.

A program processes BLOCK items (targets, edges or nodes) of one relation; ``programs_ptr``, [2, grid], has the
relation and the first item of each program. Grids cover the capacities; programs skip items beyond the device's
counts. ``table_ptr`` is [FIELDS, R] for one hop; its fields are below. R relations, T types, H hops.

Prefix sums run over all relations, end to end, and are inclusive; :func:`before` makes them exclusive. A stamp is the
smallest position, over all relations, of the edges that reach a node, or -1 - number once the node has a number.
Kernels read a stamp before the atomic minimum, which avoids most atomics on popular nodes. Stamps only decrease, so a
stale value costs only a superfluous atomic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.random_bits.kernels import site_keys, word

UNSEEN = tl.constexpr((1 << 31) - 1)

# Rows of ``table_ptr``.
SOURCE = tl.constexpr(0)  # type of sources
TARGET = tl.constexpr(1)  # type of targets
STAMPS = tl.constexpr(2)  # offset of the source type's stamps
SOURCE_NODES = tl.constexpr(3)  # offset of the source type in the block's nodes
TARGET_NODES = tl.constexpr(4)  # offset of the target type in the block's nodes
TARGETS = tl.constexpr(5)  # offset of the relation in the targets of the hop
TARGET_CAPACITY = tl.constexpr(6)  # capacity of targets
EDGES = tl.constexpr(7)  # offset of the relation in the edges of the block
HOP_EDGES = tl.constexpr(8)  # offset of the relation in the edges up to this hop
EDGE_CAPACITY = tl.constexpr(9)  # capacity of edges up to this hop
SOURCE_CAPACITY = tl.constexpr(10)  # capacity of sources up to this hop
ROW_CAPACITY = tl.constexpr(11)  # capacity of rows up to this hop
INDPTR = tl.constexpr(12)  # offset of the relation in ``indptr``
ROWS = tl.constexpr(13)  # offset of the relation in ``rows``
ROW_INDPTR = tl.constexpr(14)  # offset of the relation in ``row_indptr``
NODE_ROW = tl.constexpr(15)  # offset of the relation in ``node_row``
ROW_STAMPS = tl.constexpr(16)  # offset of the relation in the stamps of rows
FIELDS = tl.constexpr(17)


@triton.jit
def items_of(programs_ptr, BLOCK: tl.constexpr):
    """Return the relation of the program, its first item, and all its items."""
    program = tl.program_id(0)
    relation = tl.load(programs_ptr + program)
    first = tl.load(programs_ptr + tl.num_programs(0) + program)
    return relation, first, first + tl.arange(0, BLOCK)


@triton.jit
def before(sums_ptr, offset):
    """Return the sum of the elements before ``offset``; ``sums_ptr`` has inclusive prefix sums."""
    return tl.load(sums_ptr + offset - 1, mask=offset > 0, other=0)


@triton.jit
def edges_within(counts_ptr, hop: tl.constexpr, relation, R: tl.constexpr, T: tl.constexpr, H: tl.constexpr):
    """Return the number of edges of a relation in the hops before ``hop``."""
    found = 0
    if hop > 0:
        found = tl.load(counts_ptr + (H + 1) * T + (hop - 1) * R + relation)
    return found


@triton.jit
def nodes_within(counts_ptr, hop: tl.constexpr, kind, T: tl.constexpr):
    """Return the number of nodes of a type within ``hop`` hops; 0 for -1."""
    found = 0
    if hop >= 0:
        found = tl.load(counts_ptr + hop * T + kind)
    return found


@triton.jit
def sample_start_kernel(
    seeds_ptr,  # (S,)
    count_ptr,  # one integer
    nodes_ptr,  # nodes of the block, from the seed type
    stamps_ptr,  # stamps of the seed type
    counts_ptr,
    S, seed_type, last_count,
    T: tl.constexpr, T_LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the seeds as the first nodes of their type, their stamps and the counts of hop 0.

    Seed number i gets the stamp -1 - i. The last count, ``overflow``, becomes 0. Grid (max(1, ceil(S / BLOCK)),).
    """
    count = tl.minimum(tl.load(count_ptr).to(tl.int32), S)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = item < count
    node = tl.load(seeds_ptr + item, mask=there, other=0)
    tl.store(nodes_ptr + item, node, mask=there)
    tl.store(stamps_ptr + node.to(tl.int64), -1 - item, mask=there)
    if tl.program_id(0) == 0:
        kind = tl.arange(0, T_LANES)
        tl.store(counts_ptr + kind, tl.where(kind == seed_type, count, 0), mask=kind < T)
        tl.store(counts_ptr + last_count, 0)  # reset overflow


@triton.jit
def sample_degree_kernel(
    programs_ptr, table_ptr, counts_ptr,
    pointers_ptr,  # (2, R, shards) int64
    per_shard_ptr,  # (R,) targets per shard
    nodes_ptr,
    begin_ptr,  # for each target of a hop: first edge in its shard, int64
    degree_ptr,  # for each target of a hop: number of edges
    take_ptr,  # for each target of a hop: number of edges to draw; 0 if an earlier hop expanded it
    shards,
    HOP: tl.constexpr, FANOUT: tl.constexpr, R: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write begin, degree and take of the targets that the hop before added; take is 0 elsewhere. HOP is from 0."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    kind = tl.load(table_ptr + TARGET * R + relation)
    capacity = tl.load(table_ptr + TARGET_CAPACITY * R + relation)
    start = tl.load(table_ptr + TARGETS * R + relation)
    low, high = nodes_within(counts_ptr, HOP - 1, kind, T), nodes_within(counts_ptr, HOP, kind, T)
    if (first + BLOCK > low) & (first < high):
        fresh = (item >= low) & (item < high)
        node = tl.load(nodes_ptr + tl.load(table_ptr + TARGET_NODES * R + relation) + item, mask=fresh, other=0)
        per_shard = tl.load(per_shard_ptr + relation)
        shard = node // per_shard
        indptr = tl.load(pointers_ptr + relation * shards + shard, mask=fresh, other=0).to(tl.pointer_type(tl.int64))
        index = node - shard * per_shard
        begin = tl.load(indptr + index, mask=fresh, other=0)
        degree = (tl.load(indptr + index + 1, mask=fresh, other=0) - begin).to(tl.int32)
        tl.store(begin_ptr + start + item, begin, mask=fresh)
        tl.store(degree_ptr + start + item, degree, mask=fresh)
        tl.store(take_ptr + start + item, tl.minimum(degree, FANOUT), mask=item < capacity)
    else:
        tl.store(take_ptr + start + item, tl.zeros((BLOCK,), tl.int32), mask=item < capacity)


@triton.jit
def sample_draw_kernel(
    programs_ptr, table_ptr, counts_ptr, pointers_ptr, per_shard_ptr, nodes_ptr,
    begin_ptr, degree_ptr, take_ptr,
    sums_ptr,  # inclusive sums of ``take_ptr``
    seed_ptr, stamps_ptr,
    indptr_ptr, edge_target_ptr,
    source_ptr,  # source of each edge of the block, as node of the graph
    shards, last_count,
    HOP: tl.constexpr, FANOUT: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, SITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw and write each new target's edges, count them, and lower their sources' stamps to their positions."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    kind = tl.load(table_ptr + TARGET * R + relation)
    start = tl.load(table_ptr + TARGETS * R + relation)
    capacity = tl.load(table_ptr + EDGE_CAPACITY * R + relation).to(tl.int32)
    low, high = nodes_within(counts_ptr, HOP - 1, kind, T), nodes_within(counts_ptr, HOP, kind, T)
    earlier = edges_within(counts_ptr, HOP, relation, R, T, H)
    others = before(sums_ptr, start)
    indptr_ptr += tl.load(table_ptr + INDPTR * R + relation)
    if first == 0:
        all_edges = earlier + before(sums_ptr, start + tl.load(table_ptr + TARGET_CAPACITY * R + relation)) - others
        tl.store(counts_ptr + (H + 1) * T + HOP * R + relation, tl.minimum(all_edges, capacity))
        tl.store(indptr_ptr + high, tl.minimum(all_edges, capacity))
        if all_edges > capacity:
            tl.store(counts_ptr + last_count, 1)
    if (first + BLOCK > low) & (first < high):
        fresh = (item >= low) & (item < high)
        node = tl.load(nodes_ptr + tl.load(table_ptr + TARGET_NODES * R + relation) + item, mask=fresh, other=0)
        degree = tl.load(degree_ptr + start + item, mask=fresh, other=0)
        take = tl.load(take_ptr + start + item, mask=fresh, other=0)
        edge = earlier + tl.load(sums_ptr + start + item, mask=fresh, other=0) - take - others
        tl.store(indptr_ptr + item, tl.minimum(edge, capacity), mask=fresh)
        take = tl.minimum(take, capacity - edge)  # edges beyond the capacity are not drawn
        picks = tl.tuple(())
        for slot in tl.static_range(FANOUT):
            one, other = site_keys(seed_ptr, relation * SITES + slot)
            last = degree - FANOUT + slot
            drawn = ((word(node.to(tl.uint32), one, other).to(tl.uint64) * (last + 1).to(tl.uint64)) >> 32).to(tl.int32)
            taken = drawn < 0
            for early in tl.static_range(slot):
                taken |= drawn == picks[early]
            picks += (tl.where(taken, last, drawn),)
        per_shard = tl.load(per_shard_ptr + relation)
        address = tl.load(pointers_ptr + (R + relation) * shards + node // per_shard, mask=fresh, other=0)
        begin = tl.load(begin_ptr + start + item, mask=fresh, other=0)
        indices = address.to(tl.pointer_type(tl.int32)) + begin
        many = degree > FANOUT
        sources = tl.tuple(())
        for slot in tl.static_range(FANOUT):
            pick = tl.where(many, picks[slot], slot)
            sources += (tl.load(indices + pick, mask=slot < take, other=0),)
        stamps_ptr += tl.load(table_ptr + STAMPS * R + relation)
        edge += tl.load(table_ptr + EDGES * R + relation).to(tl.int32)
        known = tl.tuple(())
        for slot in tl.static_range(FANOUT):
            known += (tl.load(stamps_ptr + sources[slot].to(tl.int64), mask=slot < take, other=-1),)
        for slot in tl.static_range(FANOUT):
            there = slot < take
            tl.store(edge_target_ptr + edge + slot, item, mask=there)
            tl.store(source_ptr + edge + slot, sources[slot], mask=there)
            falls = there & (edge + slot < known[slot])
            tl.atomic_min(stamps_ptr + sources[slot].to(tl.int64), edge + slot, mask=falls, sem="relaxed")


@triton.jit
def sample_flag_kernel(
    programs_ptr, table_ptr, counts_ptr, stamps_ptr, source_ptr,
    flag_ptr,  # for each edge up to this hop: 1 if it belongs to this hop and opens a node
    HOP: tl.constexpr, R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the flag: whether an edge belongs to this hop and its position is its source's stamp."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    capacity = tl.load(table_ptr + EDGE_CAPACITY * R + relation)
    edges = tl.load(table_ptr + EDGES * R + relation)
    low, high = edges_within(counts_ptr, HOP, relation, R, T, H), edges_within(counts_ptr, HOP + 1, relation, R, T, H)
    flag = tl.zeros((BLOCK,), tl.int32)
    if (first + BLOCK > low) & (first < high):
        fresh = (item >= low) & (item < high)
        source = tl.load(source_ptr + edges + item, mask=fresh, other=0).to(tl.int64)
        stamps_ptr += tl.load(table_ptr + STAMPS * R + relation)
        flag = (tl.load(stamps_ptr + source, mask=fresh, other=-1) == edges + item).to(tl.int32)
    tl.store(flag_ptr + tl.load(table_ptr + HOP_EDGES * R + relation) + item, flag, mask=item < capacity)


@triton.jit
def _opened(table_ptr, sums_ptr, R: tl.constexpr, R_LANES: tl.constexpr):
    """Return for each relation: type of sources, and number of nodes that its edges open; -1 and 0 beyond R."""
    lane = tl.arange(0, R_LANES)
    there = lane < R
    source = tl.load(table_ptr + SOURCE * R + lane, mask=there, other=-1)
    start = tl.load(table_ptr + HOP_EDGES * R + lane, mask=there, other=0)
    end = start + tl.load(table_ptr + EDGE_CAPACITY * R + lane, mask=there, other=0)
    return lane, source, before(sums_ptr, end) - before(sums_ptr, start)


@triton.jit
def sample_number_kernel(
    programs_ptr, table_ptr, counts_ptr, stamps_ptr, source_ptr, flag_ptr,
    sums_ptr,  # inclusive sums of ``flag_ptr``
    capacity_ptr,  # (T,) capacity of nodes after this hop
    nodes_ptr, last_count,
    HOP: tl.constexpr, R: tl.constexpr, R_LANES: tl.constexpr, T: tl.constexpr, T_LANES: tl.constexpr,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the nodes that this hop's edges open, their numbers as stamps, and the counts of nodes."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    low, high = edges_within(counts_ptr, HOP, relation, R, T, H), edges_within(counts_ptr, HOP + 1, relation, R, T, H)
    if (first + BLOCK > low) & (first < high):
        start = tl.load(table_ptr + HOP_EDGES * R + relation)
        fresh = (item >= low) & (item < high)
        opens = tl.load(flag_ptr + start + item, mask=fresh, other=0) > 0
        source = tl.load(source_ptr + tl.load(table_ptr + EDGES * R + relation) + item, mask=opens, other=0)
        kind = tl.load(table_ptr + SOURCE * R + relation)
        lane, kinds, opened = _opened(table_ptr, sums_ptr, R, R_LANES)
        base = nodes_within(counts_ptr, HOP, kind, T) + tl.sum(tl.where((kinds == kind) & (lane < relation), opened, 0))
        rank = tl.load(sums_ptr + start + item, mask=opens, other=1) - 1 - before(sums_ptr, start)
        number = base + rank
        fits = number < tl.load(table_ptr + SOURCE_CAPACITY * R + relation)
        tl.store(nodes_ptr + tl.load(table_ptr + SOURCE_NODES * R + relation) + number, source, mask=opens & fits)
        stamps_ptr += tl.load(table_ptr + STAMPS * R + relation)
        tl.store(stamps_ptr + source.to(tl.int64), tl.where(fits, -1 - number, UNSEEN), mask=opens)
    if tl.program_id(0) == 0:
        types = tl.arange(0, T_LANES)
        there = types < T
        lane, kinds, opened = _opened(table_ptr, sums_ptr, R, R_LANES)
        new = tl.sum(tl.where(kinds[None, :] == types[:, None], opened[None, :], 0), 1)
        total = tl.load(counts_ptr + HOP * T + types, mask=there, other=0) + new
        capacity = tl.load(capacity_ptr + types, mask=there, other=0)
        tl.store(counts_ptr + (HOP + 1) * T + types, tl.minimum(total, capacity), mask=there)
        if tl.sum((total > capacity).to(tl.int32)) > 0:
            tl.store(counts_ptr + last_count, 1)


@triton.jit
def sample_clear_kernel(
    programs_ptr,
    type_table_ptr,  # (2, T) int64: offset of each type in the block's nodes, and in the stamps
    counts_ptr, nodes_ptr, stamps_ptr,
    T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reset the stamps of all nodes of the block. Items are nodes of a type."""
    kind, first, item = items_of(programs_ptr, BLOCK)
    count = nodes_within(counts_ptr, H, kind, T)
    if first < count:
        there = item < count
        node = tl.load(nodes_ptr + tl.load(type_table_ptr + kind) + item, mask=there, other=0).to(tl.int64)
        unseen = tl.zeros((BLOCK,), tl.int32) + UNSEEN
        tl.store(stamps_ptr + tl.load(type_table_ptr + T + kind) + node, unseen, mask=there)


@triton.jit
def _capacity_at_hop(table_ptr, counts_ptr, field: tl.constexpr, relation, item, R, T: tl.constexpr, H: tl.constexpr):
    """Return a table field of the hop to which each edge belongs; ``table_ptr`` has the tables of all hops."""
    capacity = tl.zeros_like(item) + tl.load(table_ptr + (H - 1) * FIELDS * R + field * R + relation).to(tl.int32)
    for back in tl.static_range(2, H + 1):
        end = edges_within(counts_ptr, H - back + 1, relation, R, T, H)
        capacity = tl.where(
            item < end, tl.load(table_ptr + (H - back) * FIELDS * R + field * R + relation).to(tl.int32), capacity
        )
    return capacity


@triton.jit
def sample_source_kernel(
    programs_ptr, table_ptr, counts_ptr, stamps_ptr,
    source_ptr,  # nodes of the graph, replaced by numbers in the block
    row_stamps_ptr,  # for all relations and nodes of their source types
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace sources by their numbers, and lower the stamps of rows to the edges' positions."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    last_ptr = table_ptr + (H - 1) * FIELDS * R
    count = edges_within(counts_ptr, H, relation, R, T, H)
    if first < count:
        there = item < count
        source_ptr += tl.load(last_ptr + EDGES * R + relation)
        source = tl.load(source_ptr + item, mask=there, other=0).to(tl.int64)
        stamp = tl.load(stamps_ptr + tl.load(last_ptr + STAMPS * R + relation) + source, mask=there, other=-1)
        last = _capacity_at_hop(table_ptr, counts_ptr, SOURCE_CAPACITY, relation, item, R, T, H) - 1
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
    """Write the first edge of each edge's row, and the flag: whether this is the edge itself."""
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
    tl.store(flag_ptr + start + item, flag, mask=item < tl.load(last_ptr + EDGE_CAPACITY * R + relation))


@triton.jit
def sample_row_kernel(
    programs_ptr, table_ptr, counts_ptr, source_ptr, opening_ptr,
    sums_ptr,  # inclusive sums of the flags
    edge_row_ptr, rows_ptr,
    key_ptr,  # for each edge of the block: its row in ``row_indptr``; unfilled edges sort after their relation's rows
    last_count,
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of each edge, the node of each row, the keys, and the counts of rows."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    last_ptr = table_ptr + (H - 1) * FIELDS * R
    count = edges_within(counts_ptr, H, relation, R, T, H)
    start = tl.load(last_ptr + EDGES * R + relation)
    others = before(sums_ptr, start)
    most = tl.load(last_ptr + ROW_CAPACITY * R + relation).to(tl.int32)
    key = tl.zeros((BLOCK,), tl.int32) + most
    if first < count:
        there = item < count
        opening = tl.load(opening_ptr + start + item, mask=there, other=0)
        number = tl.load(sums_ptr + start + opening, mask=there, other=1) - 1 - others
        capacity = _capacity_at_hop(table_ptr, counts_ptr, ROW_CAPACITY, relation, item, R, T, H)
        row = tl.minimum(number, capacity - 1)
        tl.store(edge_row_ptr + start + item, row, mask=there)
        opens = there & (opening == item) & (number < most)
        source = tl.load(source_ptr + start + item, mask=opens, other=0)
        tl.store(rows_ptr + tl.load(last_ptr + ROWS * R + relation) + number, source, mask=opens)
        key = tl.where(there, row, key)
    key += tl.load(last_ptr + ROW_INDPTR * R + relation).to(tl.int32)
    tl.store(key_ptr + start + item, key, mask=item < tl.load(last_ptr + EDGE_CAPACITY * R + relation))
    if first == 0:
        for hop in tl.static_range(H):
            end = edges_within(counts_ptr, hop + 1, relation, R, T, H)
            rows = before(sums_ptr, start + end) - others
            capacity = tl.load(table_ptr + hop * FIELDS * R + ROW_CAPACITY * R + relation).to(tl.int32)
            tl.store(counts_ptr + (H + 1) * T + (H + hop) * R + relation, tl.minimum(rows, capacity))
            if rows > capacity:
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
        has &= row < tl.load(last_ptr + ROW_CAPACITY * R + relation)
        tl.store(node_row_ptr + tl.load(last_ptr + NODE_ROW * R + relation) + item, tl.where(has, row, -1), mask=there)
