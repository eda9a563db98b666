"""The rows of tables, or of shards of them, that one rank holds, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.distributed.meminfo import meminfo
from common.errors import ConfigError
from common.recommendation import initial_rows
from common.recommendation.placement import Shard
from common.recommendation.tables import Tables


def require_memory(size: int, what: str, device: torch.device) -> None:
    """Refuse ``size`` bytes of ``what`` that a GPU, or the host in the place of one, does not have.

    Raises:
        ConfigError: it names the bytes.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch, for whoever asks
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
        tables: of which there are rows.
        shards: that the store holds, in the order in which they lie.
        seed: of initial rows.
        dtype: of rows.
        device: of rows.

    Attributes:
        shards: as given.
        bases: for each shard the row of the store at which it begins.
        rows_RW: the rows.

    Raises:
        ConfigError: the device lacks the memory.
    """

    def __init__(
        self, tables: Tables, shards: Sequence[Shard], seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shards = tuple(shards)
        counts = [shard.rows(tables) for shard in self.shards]
        self.bases = tuple(sum(counts[:number]) for number in range(len(counts)))
        require_memory(sum(counts) * tables.width * dtype.itemsize, "rows", device)
        self.rows_RW = torch.empty(sum(counts), tables.width, dtype=dtype, device=device)
        for shard, base, count in zip(self.shards, self.bases, counts, strict=True):
            rows = self.rows_RW[base : base + count]
            initial_rows.fill(rows, shard.table, tables.tables[shard.table].rows, seed, shard.shard, shard.shards)

    def part(self, number: int, of: Tensor) -> Tensor:
        """The shard ``number`` of ``of``, which has a row for each row of the store."""
        last = self.bases[number + 1] if number + 1 < len(self.bases) else len(of)
        return of[self.bases[number] : last]
