"""Slots for rare rows: each different rare row of a rank's samples gets one, from a fixed number per shard.

Ids of hybrid tables are frequent, rare, or outside of their table. The rare ids are sorted by shard and row; equal
ids share one slot, and the slots of a shard are consecutive. Counts stay on the device, and shapes depend only on the
batch size. If a shard has too few slots, rows share its last one, which makes the batch invalid; this is counted.

Shapes: B samples of this rank, L ids of a sample, K of them of hybrid tables, M = B K, H hybrid tables, P shards of
hybrid tables on all ranks, S slots for all of them, I rows of hybrid tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.ops.embedding_bags import Bag, Bags, SortedKeys
from common.recommendation.placement import Placement, TableShard


@dataclass(frozen=True)
class Slots:
    """Slots for a batch size.

    Attributes:
        counts: slots of each rank.
        capacity_P: int64, slots of each shard, then 1.
        first_P: int64, first slot of each shard, then S.
        bags: bags of the hybrid tables, over the slots of a sample's ids.
    """

    counts: tuple[int, ...]
    total: int
    capacity_P: Tensor
    first_P: Tensor
    bags: Bags


@dataclass(frozen=True)
class FoundSlots:
    """Frequent rows and slots of a batch.

    Attributes:
        local_BL: int32, the ids; for hybrid tables the index of the frequent row, -1 if the id is not frequent.
        slot_BK: int32, slots of the ids of hybrid tables, -1 for an id without slot.
        keys: the ids of hybrid tables, sorted by slot.
        requested_S: int32, row of its rank's store that each slot requests, -1 for an empty slot.
        overflow_H: int32, for each hybrid table the number of shards with more different rows than slots.
    """

    local_BL: Tensor
    slot_BK: Tensor
    keys: SortedKeys
    requested_S: Tensor
    overflow_H: Tensor


class SlotFinder:
    """Finds frequent rows and slots. Needs 4 bytes on the device for every row of hybrid tables."""

    def __init__(self, plan: Placement, device: torch.device) -> None:
        self._plan, self._device = plan, device
        tables = plan.tables
        self._pieces: list[tuple[int, TableShard]] = [
            (rank, shard) for rank in range(plan.ranks) for shard in plan.rare_shards_of(rank)
        ]
        number = {hybrid.table: index for index, hybrid in enumerate(plan.hybrids)}
        piece_HT = torch.zeros(len(number), max(len(hybrid.ranks) for hybrid in plan.hybrids), dtype=torch.int64)
        starts, bases, within = [0], [], [0] * plan.ranks
        for piece, (rank, shard) in enumerate(self._pieces):
            piece_HT[number[shard.table], shard.shard] = piece
            bases.append(within[rank])
            within[rank] += shard.rows(tables)
            starts.append(starts[-1] + shard.rows(tables))
        # Rows are numbered shard by shard. The next number is for ids that are not rare.
        self._none = starts[-1]
        kind = torch.int32 if self._none < 2**31 - 1 else torch.int64
        self._start_P = torch.tensor(starts, dtype=kind, device=device)
        self._base_P = torch.tensor([*bases, 0], dtype=torch.int64, device=device)
        self._table_P = [number[shard.table] for _, shard in self._pieces]
        self._of_table_P = torch.tensor(self._table_P, dtype=torch.int64, device=device)
        self._piece_HT = piece_HT.to(device)
        self._frequent_I = self._frequent().to(device)

        column, hybrids, rows, shards, first, row = [], [], [], [], [], 0
        for hybrid in plan.hybrids:
            table = tables.tables[hybrid.table]
            for lookup in range(table.hotness):
                column.append(tables.columns[hybrid.table] + lookup)
                hybrids.append(number[hybrid.table])
                rows.append(table.rows)
                shards.append(len(hybrid.ranks))
                first.append(row)
            row += table.rows
        self._column_K, self._hybrid_K, self._first_K = (
            torch.tensor(values, dtype=torch.int64, device=device) for values in (column, hybrids, first)
        )
        self._rows_K, self._shards_K = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, shards)
        )
        self._slots_of: dict[int, Slots] = {}

    def slots(self, batch: int) -> Slots:
        """Return the slots for a batch size. Warm-up creates them, because they cannot be made inside a capture."""
        if batch not in self._slots_of:
            plan, counts, first, capacity = self._plan, [0] * self._plan.ranks, [0], []
            for (rank, shard), number in zip(self._pieces, self._table_P, strict=True):
                slots = plan.hybrids[number].capacity(shard, batch, plan.tables)
                counts[rank] += slots
                capacity.append(slots)
                first.append(first[-1] + slots)
            bags, column = [], 0
            for hybrid in plan.hybrids:
                hotness = plan.tables.tables[hybrid.table].hotness
                bags.append(Bag(column, hotness, 0, first[-1]))
                column += hotness
            capacity_P, first_P = (
                torch.tensor(values, dtype=torch.int64, device=self._device) for values in ([*capacity, 1], first)
            )
            made = Slots(tuple(counts), first[-1], capacity_P, first_P, Bags(bags, self._device))
            self._slots_of[batch] = made
        return self._slots_of[batch]

    def find(self, ids_BL: Tensor) -> FoundSlots:
        """Return frequent rows and slots of a batch's ids (int32). Capturable."""
        slots = self.slots(len(ids_BL))
        key_BK = ids_BL.index_select(1, self._column_K)
        inside_BK = (key_BK >= 0) & (key_BK < self._rows_K)
        key_BK = key_BK.where(inside_BK, 0)
        frequent_BK = self._frequent_I[key_BK + self._first_K].where(inside_BK, -1)
        local_BL = ids_BL.index_copy(1, self._column_K, frequent_BK)
        piece_BK = self._piece_HT[self._hybrid_K, (key_BK % self._shards_K).long()]
        number_BK = self._start_P[piece_BK] + key_BK // self._shards_K
        number_BK = number_BK.where(inside_BK & (frequent_BK < 0), self._none)

        number_M, order_M = number_BK.flatten().sort(stable=True)
        piece_M = torch.searchsorted(self._start_P, number_M, right=True) - 1
        new_M = torch.ones_like(number_M, dtype=torch.bool)
        new_M[1:] = number_M[1:] != number_M[:-1]
        different_M = torch.nn.functional.pad(new_M.cumsum(0), (1, 0))  # different numbers before each index
        before_P = different_M[torch.searchsorted(number_M, self._start_P)]
        rank_M = different_M[1:] - 1 - before_P[piece_M]
        slot_M = slots.first_P[piece_M] + rank_M.minimum(slots.capacity_P[piece_M] - 1)
        requested_S = ids_BL.new_full((slots.total + 1,), -1)
        row_M = self._base_P[piece_M] + number_M - self._start_P[piece_M]
        requested_S.scatter_(0, slot_M, row_M.to(torch.int32))

        slot_M = slot_M.to(torch.int32)
        slot_BK = torch.empty_like(slot_M).scatter_(0, order_M, slot_M).view_as(key_BK)
        per_sample, tables = key_BK.shape[1], len(self._plan.hybrids)
        source_M = order_M // per_sample * tables + self._hybrid_K[order_M % per_sample]
        ours = (slot_M < slots.total).sum(dtype=torch.int32)
        keys = SortedKeys(slot_M, source_M.to(torch.int32), ours, tables, slots.total)
        overflow_P = (before_P.diff() > slots.capacity_P[:-1]).to(torch.int32)
        overflow_H = overflow_P.new_zeros(tables).index_add_(0, self._of_table_P, overflow_P)
        return FoundSlots(local_BL, slot_BK.where(slot_BK < slots.total, -1), keys, requested_S[:-1], overflow_H)

    def _frequent(self) -> Tensor:
        """Return int32 (I,): index of each row among the frequent rows of its table, -1 for a rare row."""
        parts = []
        for hybrid in self._plan.hybrids:
            index_R = torch.full((self._plan.tables.tables[hybrid.table].rows,), -1, dtype=torch.int32)
            index_R[torch.tensor(hybrid.frequent, dtype=torch.int64)] = torch.arange(
                len(hybrid.frequent), dtype=torch.int32
            )
            parts.append(index_R)
        return torch.cat(parts)
