"""Gathering of rows with the Triton kernel of :mod:`benchmarks.rgat.ops.gather_rows.kernels`.

It takes one launch on the current stream, without synchronization. Shapes: N node entries, B bytes per row, T types.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from benchmarks.rgat.device_tables import device_table
from benchmarks.rgat.ops.gather_rows import kernels
from benchmarks.rgat.ops.gather_rows.reference import ShardedRows, check
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors

VECTOR = 16
"""Bytes that a thread loads at once."""

WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Dtype in which rows are copied, by bytes per word."""


TILES: dict[str, Tile] = {"forward": Tile(bytes=16384, warps=4, programs=4)}
"""``bytes``: bytes of rows that a program has in flight with the largest words."""


@torch.no_grad()
def gather_rows(rows: ShardedRows, node_N: Tensor, count_T: Tensor, offsets: Sequence[int], out_NB: Tensor) -> None:
    """See :func:`benchmarks.rgat.ops.gather_rows.reference.gather_rows_reference`."""
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
    kernels.gather_rows_kernel[(min(most, triton.cdiv(offsets[-1], together) + len(offsets) - 1),)](
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
