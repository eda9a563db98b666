# mypy: allow-untyped-defs
"""Triton kernel that copies rows from shards by node number.

The shards may be in the memory of this GPU, of other GPUs, or of the host. The kernel reads them in place. To hide
the latency of NVLink or PCIe, a program has several rows in flight, in pieces of up to 16 bytes, and loads its next
node numbers before it waits for the current rows. Blocks of rows of all types are assigned to the programs in turn;
unfilled entries cost nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_rows_kernel(
    address_ptr,  # (shards,) int64
    type_ptr,  # (3, TYPES) int64: first entry, rows per shard, first row in a shard
    count_ptr,  # (TYPES,) int32
    node_ptr,  # (entries,) int32
    out_ptr,  # (entries, WORDS)
    WORD_BYTES: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr,
    TYPES: tl.constexpr, ONE_SHARD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy rows. Grid (programs,). COLUMNS is WORDS rounded up to a power of two; ALIGNMENT is in bytes."""
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    program, programs = tl.program_id(0), tl.num_programs(0)
    begun = tl.full((), 0, tl.int32)
    for number in range(TYPES):
        first_place = tl.load(type_ptr + number)
        per_shard = tl.load(type_ptr + TYPES + number).to(tl.int32)
        first_row = tl.load(type_ptr + 2 * TYPES + number)
        count = tl.load(count_ptr + number)
        blocks = tl.cdiv(count, ROWS)
        own = (program + programs - begun % programs) % programs
        begun += blocks
        own_nodes = node_ptr + first_place
        place = own * ROWS + lane
        node = tl.load(own_nodes + place, mask=place < count, other=0)
        for block in range(own, blocks, programs):
            place = block * ROWS + lane
            later = place + programs * ROWS
            node_later = tl.load(own_nodes + later, mask=later < count, other=0)
            if ONE_SHARD:
                row = node
                start = tl.load(address_ptr)
            else:
                shard = node // per_shard
                row = node - shard * per_shard
                start = tl.load(address_ptr + shard)
            start += (first_row + row) * (WORDS * WORD_BYTES)
            source = tl.multiple_of(start.to(out_ptr.dtype), ALIGNMENT)[:, None] + column
            there = (place < count)[:, None] & (column < WORDS)
            words = tl.load(source, mask=there)
            target = tl.multiple_of((first_place + place) * WORDS, ALIGNMENT // WORD_BYTES)
            tl.store(out_ptr + target[:, None] + column, words, mask=there)
            node = node_later
