# mypy: allow-untyped-defs
"""Triton kernels that sample the edges and nodes of a hop, one launch for all relations.

A program works on BLOCK items of one relation: targets, edges or nodes. Which, ``programs_ptr`` says: [2, grid], the
relation and the first of its items. Grids are as large as the room; items beyond what the device has counted are none.
``table_ptr`` is [FIELDS, R] of a hop: see the names below. R relations, T types, H hops.

Sums over all relations end to end are inclusive; what comes before an offset is ``before`` it. A stamp is the smallest
position of the edges that reach a node, counted over all relations, or -1 - its number once it has one. Reading a stamp
first spares most atomics on popular nodes: it only ever falls, so an old value costs no more than an atomic too many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.random_bits.kernels import site_keys, word

UNSEEN = tl.constexpr((1 << 31) - 1)

# Rows of ``table_ptr``.
SOURCE = tl.constexpr(0)  # type of sources
TARGET = tl.constexpr(1)  # type of targets
STAMPS = tl.constexpr(2)  # where the stamps of the source type begin
SOURCE_NODES = tl.constexpr(3)  # where the source type begins in the block's nodes
TARGET_NODES = tl.constexpr(4)  # where the target type begins in the block's nodes
TARGETS = tl.constexpr(5)  # where the relation begins among the targets of the hop
TARGET_ROOM = tl.constexpr(6)  # targets that have room
EDGES = tl.constexpr(7)  # where the relation begins among the edges of the block
HOP_EDGES = tl.constexpr(8)  # where it begins among the edges up to this hop
EDGE_ROOM = tl.constexpr(9)  # edges that have room up to this hop
SOURCE_ROOM = tl.constexpr(10)  # sources that have room up to this hop
ROW_ROOM = tl.constexpr(11)  # rows that have room up to this hop
INDPTR = tl.constexpr(12)  # where the relation begins in ``indptr``
ROWS = tl.constexpr(13)  # where it begins in ``rows``
ROW_INDPTR = tl.constexpr(14)  # where it begins in ``row_indptr``
NODE_ROW = tl.constexpr(15)  # where it begins in ``node_row``
ROW_STAMPS = tl.constexpr(16)  # where it begins among the stamps of rows
FIELDS = tl.constexpr(17)


@triton.jit
def items_of(programs_ptr, BLOCK: tl.constexpr):
    """Relation of the program, the first of its items, and all of them."""
    program = tl.program_id(0)
    relation = tl.load(programs_ptr + program)
    first = tl.load(programs_ptr + tl.num_programs(0) + program)
    return relation, first, first + tl.arange(0, BLOCK)


@triton.jit
def before(sums_ptr, offset):
    """Sum of everything before ``offset``."""
    return tl.load(sums_ptr + offset - 1, mask=offset > 0, other=0)


@triton.jit
def edges_within(counts_ptr, hop: tl.constexpr, relation, R: tl.constexpr, T: tl.constexpr, H: tl.constexpr):
    """Edges of a relation of the hops before ``hop``."""
    found = 0
    if hop > 0:
        found = tl.load(counts_ptr + (H + 1) * T + (hop - 1) * R + relation)
    return found


@triton.jit
def nodes_within(counts_ptr, hop: tl.constexpr, kind, T: tl.constexpr):
    """Nodes of a type within ``hop`` hops; none within -1."""
    found = 0
    if hop >= 0:
        found = tl.load(counts_ptr + hop * T + kind)
    return found


@triton.jit
def sample_start_kernel(
    seeds_ptr,  # (S,)
    count_ptr,  # one integer
    nodes_ptr,  # the block's, from the seeds' type on
    stamps_ptr,  # of the seeds' type
    counts_ptr,
    S, seed_type, last_count,
    T: tl.constexpr, T_LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number the seeds. Grid (ceil(S / BLOCK),)."""
    count = tl.minimum(tl.load(count_ptr).to(tl.int32), S)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = item < count
    node = tl.load(seeds_ptr + item, mask=there, other=0)
    tl.store(nodes_ptr + item, node, mask=there)
    tl.store(stamps_ptr + node.to(tl.int64), -1 - item, mask=there)
    if tl.program_id(0) == 0:
        kind = tl.arange(0, T_LANES)
        tl.store(counts_ptr + kind, tl.where(kind == seed_type, count, 0), mask=kind < T)
        tl.store(counts_ptr + last_count, 0)  # nothing has overflown


@triton.jit
def sample_degree_kernel(
    programs_ptr, table_ptr, counts_ptr,
    pointers_ptr,  # (2, R, shards) int64
    per_shard_ptr,  # (R,) targets of a shard
    nodes_ptr,
    begin_ptr,  # of the targets of a hop: first edge in its shard, int64
    degree_ptr,  # of the targets of a hop: edges
    take_ptr,  # of the targets of a hop: edges that are drawn; 0 for those that an earlier hop expanded
    shards,
    HOP: tl.constexpr, FANOUT: tl.constexpr, R: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look up how many edges each target has. HOP from 0."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    kind = tl.load(table_ptr + TARGET * R + relation)
    room = tl.load(table_ptr + TARGET_ROOM * R + relation)
    start = tl.load(table_ptr + TARGETS * R + relation)
    low, high = nodes_within(counts_ptr, HOP - 1, kind, T), nodes_within(counts_ptr, HOP, kind, T)
    if (first + BLOCK > low) & (first < high):
        fresh = (item >= low) & (item < high)
        node = tl.load(nodes_ptr + tl.load(table_ptr + TARGET_NODES * R + relation) + item, mask=fresh, other=0)
        per_shard = tl.load(per_shard_ptr + relation)
        shard = node // per_shard
        indptr = tl.load(pointers_ptr + relation * shards + shard, mask=fresh, other=0).to(tl.pointer_type(tl.int64))
        place = node - shard * per_shard
        begin = tl.load(indptr + place, mask=fresh, other=0)
        degree = (tl.load(indptr + place + 1, mask=fresh, other=0) - begin).to(tl.int32)
        tl.store(begin_ptr + start + item, begin, mask=fresh)
        tl.store(degree_ptr + start + item, degree, mask=fresh)
        tl.store(take_ptr + start + item, tl.minimum(degree, FANOUT), mask=item < room)
    else:
        tl.store(take_ptr + start + item, tl.zeros((BLOCK,), tl.int32), mask=item < room)


@triton.jit
def sample_draw_kernel(
    programs_ptr, table_ptr, counts_ptr, pointers_ptr, per_shard_ptr, nodes_ptr,
    begin_ptr, degree_ptr, take_ptr,
    sums_ptr,  # inclusive sums of ``take_ptr``
    seed_ptr, stamps_ptr,
    indptr_ptr, edge_target_ptr,
    source_ptr,  # of the block's edges: nodes of the graph
    shards, last_count,
    HOP: tl.constexpr, FANOUT: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, SITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the edges of each target and leave their positions in the stamps of their sources."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    kind = tl.load(table_ptr + TARGET * R + relation)
    start = tl.load(table_ptr + TARGETS * R + relation)
    room = tl.load(table_ptr + EDGE_ROOM * R + relation).to(tl.int32)
    low, high = nodes_within(counts_ptr, HOP - 1, kind, T), nodes_within(counts_ptr, HOP, kind, T)
    earlier = edges_within(counts_ptr, HOP, relation, R, T, H)
    others = before(sums_ptr, start)
    indptr_ptr += tl.load(table_ptr + INDPTR * R + relation)
    if first == 0:
        all_edges = earlier + before(sums_ptr, start + tl.load(table_ptr + TARGET_ROOM * R + relation)) - others
        tl.store(counts_ptr + (H + 1) * T + HOP * R + relation, tl.minimum(all_edges, room))
        tl.store(indptr_ptr + high, tl.minimum(all_edges, room))
        if all_edges > room:
            tl.store(counts_ptr + last_count, 1)
    if (first + BLOCK > low) & (first < high):
        fresh = (item >= low) & (item < high)
        node = tl.load(nodes_ptr + tl.load(table_ptr + TARGET_NODES * R + relation) + item, mask=fresh, other=0)
        degree = tl.load(degree_ptr + start + item, mask=fresh, other=0)
        take = tl.load(take_ptr + start + item, mask=fresh, other=0)
        edge = earlier + tl.load(sums_ptr + start + item, mask=fresh, other=0) - take - others
        tl.store(indptr_ptr + item, tl.minimum(edge, room), mask=fresh)
        take = tl.minimum(take, room - edge)  # what has no room is not drawn
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
    flag_ptr,  # of the edges up to this hop: 1 for those of this hop that open a node
    HOP: tl.constexpr, R: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the edges whose position is the stamp of their source."""
    relation, first, item = items_of(programs_ptr, BLOCK)
    room = tl.load(table_ptr + EDGE_ROOM * R + relation)
    edges = tl.load(table_ptr + EDGES * R + relation)
    low, high = edges_within(counts_ptr, HOP, relation, R, T, H), edges_within(counts_ptr, HOP + 1, relation, R, T, H)
    flag = tl.zeros((BLOCK,), tl.int32)
    if (first + BLOCK > low) & (first < high):
        fresh = (item >= low) & (item < high)
        source = tl.load(source_ptr + edges + item, mask=fresh, other=0).to(tl.int64)
        stamps_ptr += tl.load(table_ptr + STAMPS * R + relation)
        flag = (tl.load(stamps_ptr + source, mask=fresh, other=-1) == edges + item).to(tl.int32)
    tl.store(flag_ptr + tl.load(table_ptr + HOP_EDGES * R + relation) + item, flag, mask=item < room)


@triton.jit
def _opened(table_ptr, sums_ptr, R: tl.constexpr, R_LANES: tl.constexpr):
    """Of each relation: type of sources, and how many nodes its edges open; both by lane, -1 and 0 beyond R."""
    lane = tl.arange(0, R_LANES)
    there = lane < R
    source = tl.load(table_ptr + SOURCE * R + lane, mask=there, other=-1)
    start = tl.load(table_ptr + HOP_EDGES * R + lane, mask=there, other=0)
    end = start + tl.load(table_ptr + EDGE_ROOM * R + lane, mask=there, other=0)
    return lane, source, before(sums_ptr, end) - before(sums_ptr, start)


@triton.jit
def sample_number_kernel(
    programs_ptr, table_ptr, counts_ptr, stamps_ptr, source_ptr, flag_ptr,
    sums_ptr,  # inclusive sums of ``flag_ptr``
    room_ptr,  # (T,) nodes that have room after this hop
    nodes_ptr, last_count,
    HOP: tl.constexpr, R: tl.constexpr, R_LANES: tl.constexpr, T: tl.constexpr, T_LANES: tl.constexpr,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number the nodes that this hop's edges open, and count them."""
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
        fits = number < tl.load(table_ptr + SOURCE_ROOM * R + relation)
        tl.store(nodes_ptr + tl.load(table_ptr + SOURCE_NODES * R + relation) + number, source, mask=opens & fits)
        stamps_ptr += tl.load(table_ptr + STAMPS * R + relation)
        tl.store(stamps_ptr + source.to(tl.int64), tl.where(fits, -1 - number, UNSEEN), mask=opens)
    if tl.program_id(0) == 0:
        types = tl.arange(0, T_LANES)
        there = types < T
        lane, kinds, opened = _opened(table_ptr, sums_ptr, R, R_LANES)
        new = tl.sum(tl.where(kinds[None, :] == types[:, None], opened[None, :], 0), 1)
        total = tl.load(counts_ptr + HOP * T + types, mask=there, other=0) + new
        room = tl.load(room_ptr + types, mask=there, other=0)
        tl.store(counts_ptr + (HOP + 1) * T + types, tl.minimum(total, room), mask=there)
        if tl.sum((total > room).to(tl.int32)) > 0:
            tl.store(counts_ptr + last_count, 1)


@triton.jit
def sample_clear_kernel(
    programs_ptr,
    type_table_ptr,  # (2, T) int64: where a type's nodes begin in the block, and its stamps
    counts_ptr, nodes_ptr, stamps_ptr,
    T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Forget all nodes of the block. Items are nodes of a type."""
    kind, first, item = items_of(programs_ptr, BLOCK)
    count = nodes_within(counts_ptr, H, kind, T)
    if first < count:
        there = item < count
        node = tl.load(nodes_ptr + tl.load(type_table_ptr + kind) + item, mask=there, other=0).to(tl.int64)
        unseen = tl.zeros((BLOCK,), tl.int32) + UNSEEN
        tl.store(stamps_ptr + tl.load(type_table_ptr + T + kind) + node, unseen, mask=there)
