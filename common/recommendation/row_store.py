"""Rows of tables or shards that one rank holds, concatenated in one tensor, and their initial values.

Each initial element depends only on the seed, the table, its row and its column, not on the plan. A table of n rows is
uniform between -1/sqrt(n) and +1/sqrt(n): 2^23 equally spaced values, symmetric around 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.distributed.environment import meminfo
from common.errors import ConfigError
from common.ops.random_bits.reference import words
from common.recommendation.placement import Hybrid, TableShard
from common.recommendation.tables import Tables

CHUNK = 1 << 22
"""Elements that are generated at a time; each needs a few dozen bytes of memory."""
SITES = 1 << 10
"""Sites of random bits per table: one for every 2^32 elements."""


@torch.no_grad()
def fill(rows_RW: Tensor, table: int, table_rows: int, seed: int, shard: int = 0, shards: int = 1) -> None:
    """Fill the rows of a table, or of a shard of it.

    Args:
        rows_RW: output; row r is row ``shard`` + r ``shards`` of the table. fp64 rows get the fp32 values.
        table_rows: rows of the whole table.
        seed: seed of the run's tables, 0 ... 2**63 - 1.
        shard, shards: index of the shard and number of shards.

    Raises:
        ValueError: the table has more elements than there are random bits.
    """
    step = max(1, CHUNK // rows_RW.shape[1])
    for first in range(0, len(rows_RW), step):
        last = min(first + step, len(rows_RW))
        row_C = torch.arange(first, last, device=rows_RW.device) * shards + shard
        _fill(rows_RW[first:last], table, table_rows, seed, row_C)


@torch.no_grad()
def fill_chosen(rows_RW: Tensor, table: int, table_rows: int, seed: int, row_R: Tensor) -> None:
    """Fill chosen rows of a table; see :func:`fill`.

    Args:
        row_R: int64, row of the table for each row of ``rows_RW``.

    Raises:
        ValueError: the table has more elements than there are random bits.
    """
    step = max(1, CHUNK // rows_RW.shape[1])
    for rows_CW, row_C in zip(rows_RW.split(step), row_R.split(step), strict=True):
        _fill(rows_CW, table, table_rows, seed, row_C)


def _fill(rows_CW: Tensor, table: int, table_rows: int, seed: int, row_C: Tensor) -> None:
    width, device = rows_CW.shape[1], rows_CW.device
    if table_rows * width > SITES << 32:
        raise ValueError(f"a table of {table_rows:,} rows of {width} elements; at most 2**42 elements have own bits")
    element_CW = row_C.unsqueeze(1) * width + torch.arange(width, device=device)
    first_CV = element_CW[:, :1] if width & (width - 1) == 0 else element_CW  # such rows never cross two sites
    site_CV = table * SITES + (first_CV >> 32)
    seed_0 = torch.tensor(seed, dtype=torch.int64, device=device)
    bits_CW = words(element_CW & 0xFFFFFFFF, seed_0, site_CV)
    odd_CW = (((bits_CW >> 9) & 0x7FFFFF) * 2 + 1).to(torch.float32)  # exact, and so is what follows
    rows_CW.copy_((odd_CW * 2.0**-23 - 1.0) * (1.0 / math.sqrt(table_rows)))


def require_memory(size: int, what: str, device: torch.device) -> None:
    """Check that a GPU, or the host in its place, has ``size`` free bytes.

    Args:
        what: purpose of the memory, for messages.

    Raises:
        ConfigError: it has less; the message has the bytes.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # memory cached by PyTorch
        free = torch.cuda.mem_get_info(device)[0] + kept
    else:
        free = meminfo().get("MemAvailable", size)
    if free < size:
        raise ConfigError(
            f"plan: {size:,} bytes of {what} for {device}, which has {free:,} left; split tables over more ranks"
        )


class RowStore:
    """Rows on a device, with their initial values.

    Args:
        shards: shards in the store, in their order.
        frequent: hybrid tables whose frequent rows come after the shards, in the order of the plan.

    Attributes:
        bases: for each shard, and then for each of ``frequent``, the index of its first row in the store.

    Raises:
        ConfigError: the device lacks the memory.
    """

    def __init__(
        self,
        tables: Tables,
        shards: Sequence[TableShard],
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        frequent: Sequence[Hybrid] = (),
    ) -> None:
        self.shards, self.frequent = tuple(shards), tuple(frequent)
        counts = [shard.rows(tables) for shard in self.shards] + [len(hybrid.frequent) for hybrid in self.frequent]
        self.bases = tuple(sum(counts[:number]) for number in range(len(counts)))
        require_memory(sum(counts) * tables.width * dtype.itemsize, "rows", device)
        self.rows_RW = torch.empty(sum(counts), tables.width, dtype=dtype, device=device)
        for number, shard in enumerate(self.shards):
            rows, size = self.part(number, self.rows_RW), tables.tables[shard.table].rows
            fill(rows, shard.table, size, seed, shard.shard, shard.shards)
        for number, hybrid in enumerate(self.frequent, len(self.shards)):
            rows, size = self.part(number, self.rows_RW), tables.tables[hybrid.table].rows
            fill_chosen(rows, hybrid.table, size, seed, torch.tensor(hybrid.frequent, device=device))

    def part(self, number: int, of: Tensor) -> Tensor:
        """Return the part of ``of``, a tensor with the store's rows, for a shard or, after these, for frequent rows."""
        last = self.bases[number + 1] if number + 1 < len(self.bases) else len(of)
        return of[self.bases[number] : last]
