"""Initial rows of tables: each element is a function of the seed, the table, its row and its column, and so of no plan.

A table of n rows is uniform between -1/sqrt(n) and +1/sqrt(n): of 2^23 values at the same distance, which lie evenly
around 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.ops.random_bits.plain import words

CHUNK = 1 << 22
"""Elements that are made at a time: a few dozen bytes of memory for each."""
PLACES = 1 << 10
"""Sites of a table: one for every 2^32 elements."""


@torch.no_grad()
def fill(rows_RW: Tensor, table: int, table_rows: int, seed: int, shard: int = 0, shards: int = 1) -> None:
    """Fill the rows of a table, or of a shard of it.

    Args:
        rows_RW: written: row r is row ``shard`` + r ``shards`` of the table; fp64 gets what fp32 gets.
        table: the table's number.
        table_rows: of the whole table.
        seed: of the run's tables, 0 ... 2**63 - 1.
        shard, shards: which of the table's rows these are.

    Raises:
        ValueError: the table has more elements than there are bits for.
    """
    count, width = rows_RW.shape
    if table_rows * width > PLACES << 32:
        raise ValueError(f"a table of {table_rows:,} rows of {width} elements; at most 2**42 elements have own bits")
    bound = 1.0 / math.sqrt(table_rows)
    device = rows_RW.device
    seed_0 = torch.tensor(seed, dtype=torch.int64, device=device)
    column_W = torch.arange(width, device=device)
    step = max(1, CHUNK // width)
    for first in range(0, count, step):
        last = min(first + step, count)
        row_C = torch.arange(first, last, device=device) * shards + shard
        element_CW = row_C.unsqueeze(1) * width + column_W
        first_CV = element_CW[:, :1] if width & (width - 1) == 0 else element_CW  # such rows never lie across two sites
        site_CV = table * PLACES + (first_CV >> 32)
        bits_CW = words(element_CW & 0xFFFFFFFF, seed_0, site_CV)
        odd_CW = (((bits_CW >> 9) & 0x7FFFFF) * 2 + 1).to(torch.float32)  # exact, and so is what follows
        rows_RW[first:last] = (odd_CW * 2.0**-23 - 1.0) * bound
