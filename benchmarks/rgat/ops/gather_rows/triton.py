# mypy: allow-untyped-defs
"""Gathering of rows with a Triton kernel, in one launch.

The shards may be in the memory of this GPU, of other GPUs, or of the host. The kernel reads them in place. To hide
the latency of NVLink or PCIe, a program has several rows in flight, in pieces of up to 16 bytes, and loads its next
node numbers before it waits for the current rows. Blocks of rows of all types are assigned to the programs in turn;
unfilled entries cost nothing.

Shapes: N node entries, B bytes per row, T types.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.rgat.graph import device_table
from benchmarks.rgat.ops.gather_rows import ShardedRows, check
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors


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
    """Copy the rows of filled nodes. Grid (programs,). COLUMNS is WORDS rounded up to 2^n; ALIGNMENT is in bytes."""
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    program, programs = tl.program_id(0), tl.num_programs(0)
    begun = tl.full((), 0, tl.int32)
    for number in range(TYPES):
        first_entry = tl.load(type_ptr + number)
        per_shard = tl.load(type_ptr + TYPES + number).to(tl.int32)
        first_row = tl.load(type_ptr + 2 * TYPES + number)
        count = tl.load(count_ptr + number)
        blocks = tl.cdiv(count, ROWS)
        own = (program + programs - begun % programs) % programs
        begun += blocks
        own_nodes = node_ptr + first_entry
        entry = own * ROWS + lane
        node = tl.load(own_nodes + entry, mask=entry < count, other=0)
        for block in range(own, blocks, programs):
            entry = block * ROWS + lane
            later = entry + programs * ROWS
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
            there = (entry < count)[:, None] & (column < WORDS)
            words = tl.load(source, mask=there)
            target = tl.multiple_of((first_entry + entry) * WORDS, ALIGNMENT // WORD_BYTES)
            tl.store(out_ptr + target[:, None] + column, words, mask=there)
            node = node_later


VECTOR = 16
"""Bytes that a thread loads at once."""

WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Dtype in which rows are copied, by bytes per word."""


TILES: dict[str, Tile] = {"forward": Tile(bytes=16384, warps=4, programs=4)}
"""``bytes``: bytes of rows that a program has in flight with the largest words."""


@torch.no_grad()
def gather_rows(rows: ShardedRows, node_N: Tensor, count_T: Tensor, offsets: Sequence[int], out_NB: Tensor) -> None:
    """Copy the row of every filled node to ``out_NB``.

    See :func:`benchmarks.rgat.ops.gather_rows.gather_rows_reference`.
    """
    check(rows, node_N, count_T, offsets, out_NB)
    alignment = math.gcd(VECTOR, rows.row_bytes)
    if any(tensor.data_ptr() % alignment for tensor in (*rows.shards, out_NB)):
        raise ValueError(f"rows of {rows.row_bytes} bytes begin at multiples of {alignment}")
    if not offsets[-1]:
        return
    tile, size = TILES["forward"], min(alignment, max(WORDS))
    words = rows.row_bytes // size
    columns = triton.next_power_of_2(words)
    together = max(1, tile.bytes // max(WORDS) // columns)
    most = multiprocessors(out_NB.device) * tile.programs
    table = _type_table(tuple(offsets[:-1]), rows.rows_per_shard, rows.first_rows, out_NB.device)
    gather_rows_kernel[(min(most, triton.cdiv(offsets[-1], together) + len(offsets) - 1),)](
        rows.addresses, table, count_T, node_N, out_NB.view(WORDS[size]),
        WORD_BYTES=size, WORDS=words, COLUMNS=columns, ALIGNMENT=alignment,
        TYPES=len(rows.first_rows), ONE_SHARD=len(rows.shards) == 1, ROWS=together, num_warps=tile.warps,
    )  # fmt: skip


@functools.cache
def _type_table(
    offsets: tuple[int, ...], rows_per_shard: tuple[int, ...], first_rows: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return [3, T], int64: first entry, rows per shard and first row in a shard of each type.

    Cached forever, because captured graphs keep reading it.
    """
    return device_table([offsets, rows_per_shard, first_rows], torch.int64, device)
