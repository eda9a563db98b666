"""Rows of tables or shards that one rank holds, concatenated in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.distributed.environment import meminfo
from common.errors import ConfigError
from common.recommendation import initial_rows
from common.recommendation.placement import Hybrid, Shard
from common.recommendation.tables import Tables


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
        seed: seed of the initial rows.
        frequent: hybrid tables whose frequent rows come after the shards, in the order of the plan.

    Attributes:
        bases: for each shard, and then for each of ``frequent``, the index of its first row in the store.
        rows_RW: the rows.

    Raises:
        ConfigError: the device lacks the memory.
    """

    def __init__(
        self,
        tables: Tables,
        shards: Sequence[Shard],
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
            initial_rows.fill(rows, shard.table, size, seed, shard.shard, shard.shards)
        for number, hybrid in enumerate(self.frequent, len(self.shards)):
            rows, size = self.part(number, self.rows_RW), tables.tables[hybrid.table].rows
            initial_rows.fill_chosen(rows, hybrid.table, size, seed, torch.tensor(hybrid.frequent, device=device))

    def part(self, number: int, of: Tensor) -> Tensor:
        """Return the part of ``of``, a tensor with the store's rows, for a shard or, after these, for frequent rows."""
        last = self.bases[number + 1] if number + 1 < len(self.bases) else len(of)
        return of[self.bases[number] : last]
