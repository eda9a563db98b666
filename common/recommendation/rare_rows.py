"""Rare rows of hybrid tables: each rank requests the rare rows of its samples from their owners, once each.

A row that many samples of a rank contain is sent once, and so is its gradient, which the rank sums before. The amount
of data depends on the plan's slots (:mod:`common.recommendation.slots`), not on samples and shards. Owners sum the
gradients of several ranks for the same row. The frequent rows, which every rank has, are stored with the replicated
tables (:attr:`common.recommendation.embeddings.ShardedEmbeddings.replicated`).

Shapes: see :mod:`common.recommendation.slots`; Q slots of all ranks for the shards of this one, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import ConfigError
from common.ops.embedding_bags import Bag, Bags, EmbeddingBags, SortedKeys
from common.recommendation.exchange import all_to_all
from common.recommendation.placement import Placement
from common.recommendation.row_store import RowStore
from common.recommendation.slots import FoundSlots, SlotFinder


@dataclass(frozen=True)
class RareRequest:
    """Rare rows of a micro-batch.

    Attributes:
        found: slots and frequent rows of this rank's ids.
        row_Q1: int32, rows of this rank's store that all ranks request, rank by rank; -1 for an empty slot.
    """

    found: FoundSlots
    row_Q1: Tensor


class RareRows:
    """Shards of hybrid tables and their exchange; all ranks call the same methods.

    Args:
        group: the ranks of the plan.
        ops: implementation of pooling, sorting and adding up.

    Attributes:
        store: rows of this rank's shards.
        bags: bags of the store, over the requested rows; None if it is empty.
        tables_H: int64, on the device, numbers of the hybrid tables.

    Raises:
        ConfigError: the device lacks the memory.
    """

    def __init__(
        self,
        plan: Placement,
        rank: int,
        group: dist.ProcessGroup | None,
        ops: EmbeddingBags,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._plan, self._rank, self._group, self._ops = plan, rank, group, ops
        self.store = RowStore(plan.tables, plan.rare_shards_of(rank), seed, dtype, device)
        rows = len(self.store.rows_RW)
        self.bags = Bags([Bag(0, 1, 0, rows)], device) if rows else None
        self.tables_H = torch.tensor([hybrid.table for hybrid in plan.hybrids], dtype=torch.int64, device=device)
        self._finder = SlotFinder(plan, device)
        self._overflow_H = torch.zeros(len(plan.hybrids), dtype=torch.int32, device=device)
        self._position_X, self._frequent_X = (torch.tensor(v, dtype=torch.int64, device=device) for v in self._shared())

    def request_rows(self, ids_BL: Tensor) -> RareRequest:
        """Request the rare rows of a micro-batch's ids (int32)."""
        found, slots = self._finder.find(ids_BL), self._finder.slots(len(ids_BL))
        own = slots.counts[self._rank]
        row_Q = ids_BL.new_empty(own * self._plan.ranks)
        all_to_all(row_Q, found.requested_S, [own] * self._plan.ranks, list(slots.counts), self._group)
        return RareRequest(found, row_Q.unsqueeze(1))

    def sums(self, request: RareRequest, out_BHW: Tensor) -> None:
        """Write the sums of rare rows for every sample and hybrid table; rows are sent in the dtype of ``out_BHW``."""
        slots, width = self._finder.slots(len(out_BHW)), self._plan.tables.width
        sent_Q1W = out_BHW.new_empty(len(request.row_Q1), 1, width)
        if self.bags is not None:
            self._ops.pool(self.store.rows_RW, request.row_Q1, self.bags, sent_Q1W)
        rows_SW = out_BHW.new_empty(slots.total, width)
        all_to_all(rows_SW.view(-1), sent_Q1W.view(-1), *self._sizes(len(out_BHW)), self._group)
        self._ops.pool(rows_SW, request.found.slot_BK, slots.bags, out_BHW)

    def gradients(self, request: RareRequest, gradient_BHW: Tensor) -> Tensor:
        """Return the gradients of the rows that all ranks requested, summed within each rank: (Q, 1, W).

        Args:
            request: result of :meth:`request_rows`.
            gradient_BHW: gradients of the sums of the hybrid tables.
        """
        slots, width = self._finder.slots(len(gradient_BHW)), self._plan.tables.width
        sum_SW = gradient_BHW.new_empty(slots.total, width)
        self._ops.dense_gradient(request.found.keys, gradient_BHW, sum_SW)
        received_Q1W = gradient_BHW.new_empty(len(request.row_Q1), 1, width)
        receive, send = self._sizes(len(gradient_BHW))
        all_to_all(received_Q1W.view(-1), sum_SW.view(-1), send, receive, self._group)
        return received_Q1W

    def sort(self, row_Q1: Tensor) -> SortedKeys | None:
        """Return the requested rows of all micro-batches, sorted for their update; None without rows."""
        return None if self.bags is None else self._ops.sort(row_Q1, self.bags)

    def copy_frequent(self, frequent_RW: Tensor, rows_RW: Tensor) -> None:
        """Copy the frequent rows of this rank's shards, or their state, to their positions in the shards.

        Args:
            frequent_RW: rows of the store with the frequent rows, or their state.
            rows_RW: rows of this store, or their state; output.
        """
        rows_RW.index_copy_(0, self._position_X, frequent_RW.index_select(0, self._frequent_X))

    def count(self, request: RareRequest) -> None:
        """Record for :meth:`check` whether there were too few slots. Capturable."""
        self._overflow_H.add_(request.found.overflow_H)

    def reset_counts(self) -> None:
        """Reset the counts."""
        self._overflow_H.zero_()

    def check(self) -> None:
        """Raise an error if a rank had too few slots since :meth:`reset_counts`. Collective; waits for the device.

        Raises:
            ConfigError: on every rank; the message names the table.
        """
        overflow_H = self._overflow_H.clone()
        if self._group is not None:
            dist.all_reduce(overflow_H, group=self._group)
        self.refuse(overflow_H.tolist())

    def refuse(self, overflows: Sequence[float]) -> None:
        """Raise an error if there were too few slots.

        Args:
            overflows: for each hybrid table, how often its slots were too few.

        Raises:
            ConfigError: the message names the first such table.
        """
        for hybrid, times in zip(self._plan.hybrids, overflows, strict=True):
            if times > 0:
                raise ConfigError(
                    f"plan: the samples of a rank have more different rare rows in a shard of table "
                    f"{self._plan.tables.tables[hybrid.table].name!r} than its {hybrid.slots:,} slots for "
                    f"{hybrid.samples:,} samples; nothing was written. Measure the plan on more batches, or raise "
                    "its slots"
                )

    def _sizes(self, batch: int) -> tuple[list[int], list[int]]:
        """Return the elements of each rank's piece: of rows received from it, and of rows sent to it."""
        counts, width = self._finder.slots(batch).counts, self._plan.tables.width
        return [count * width for count in counts], [counts[self._rank] * width] * self._plan.ranks

    def _shared(self) -> tuple[list[int], list[int]]:
        """Return for each frequent row of this rank's shards its row here and in the store of frequent rows."""
        positions, rows, tables = [], [], self._plan.tables.tables
        base = {shard.table: (shard, at) for shard, at in zip(self.store.shards, self.store.bases, strict=True)}
        first = sum(tables[table].rows for table in self._plan.replicated)
        for hybrid in self._plan.with_frequent:
            if hybrid.table in base:
                shard, at = base[hybrid.table]
                for number, key in enumerate(hybrid.frequent):
                    if key % shard.shards == shard.shard:
                        positions.append(at + key // shard.shards)
                        rows.append(first + number)
            first += len(hybrid.frequent)
        return positions, rows
