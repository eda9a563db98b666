"""Exchange between ranks: ids to the ranks that hold the rows, sums of rows back, and gradients of the sums.

Every rank has different samples and different shards of tables. It sends all ids of a table to every owner of a shard
of it; the owner ignores ids of other shards, sums rows for the samples of all ranks, and sends each rank the sums of
its samples. The receiver adds up the sums of several owners of one table. All sizes follow from plan and batch, so
nothing can overflow. Rare rows of hybrid tables are exchanged differently (:mod:`common.recommendation.rare_rows`).

Shapes: B samples of this rank, G ranks, N = G B, L ids of a sample, F tables, K shards of this rank, J shards of all
ranks, D sums that a rank computes for its own samples (:attr:`common.recommendation.placement.Placement.own_sums`), W
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from common.ops.embedding_bags import Bag, Bags, EmbeddingBags
from common.recommendation.placement import Placement, TableShard


@dataclass(frozen=True)
class ReceivedVectors:
    """Positions of the received vectors of B samples, and which of them add up to one vector.

    Attributes:
        parts_BP: int32, rows of the received buffer that add up to the vectors of a sample, table by table.
        sums: bags of these rows, one per table; None without tables.
        sent_M: int64, for every vector that goes back to a sender, sender by sender and sample by sample, its row
            among the vectors of all samples.
    """

    parts_BP: Tensor
    sums: Bags | None
    sent_M: Tensor


def received_vectors(
    batch: int, tables: int, senders: Sequence[Sequence[int]], leading: int, device: torch.device | str
) -> ReceivedVectors:
    """Return the positions for a batch. Copies to the device, so call it outside of captures.

    Args:
        tables: number of tables; each has a sender.
        senders: for each sender, the tables that it sends for every sample.
        leading: number of vectors of a sample before those of the tables.
    """
    sample_B = torch.arange(batch)
    parts: list[list[Tensor]] = [[] for _ in range(tables)]
    sent: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    before = 0
    for numbers in senders:
        for index, table in enumerate(numbers):
            parts[table].append(before + sample_B * len(numbers) + index)
        if numbers:
            vector_K = leading + torch.tensor(list(numbers))
            sent.append((sample_B.unsqueeze(1) * (leading + tables) + vector_K).flatten())
        before += batch * len(numbers)
    bags: list[Bag] = []
    for found in parts:
        bags.append(Bag(sum(bag.hotness for bag in bags), len(found), 0, before))
    flat = [part for found in parts for part in found]
    parts_BP = torch.stack(flat, 1).to(device, torch.int32) if flat else torch.empty(batch, 0, dtype=torch.int32)
    return ReceivedVectors(parts_BP, Bags(bags, device) if bags else None, torch.cat(sent).to(device))


class VectorExchange(Protocol):
    """Interface of an exchange; every rank of the group calls the same methods in the same order."""

    @property
    def shards(self) -> tuple[TableShard, ...]:
        """Shards of this rank."""

    @property
    def bags(self) -> Bags | None:
        """Bags of the shards, over the ids that :meth:`ids` returns; None if there are no shards."""

    def ids(self, ids_BL: Tensor) -> Tensor:
        """Return the ids of all ranks' samples for at least the tables of this rank's shards.

        Args:
            ids_BL: int32.

        Returns:
            int32 (N, ids of these tables), the samples rank by rank.
        """

    def vectors(self, own_NKW: Tensor, replicated_BDW: Tensor, out_BFW: Tensor) -> None:
        """Send the sums of rows to the ranks that have the samples.

        Args:
            own_NKW: sums of this rank's shards, contiguous.
            replicated_BDW: sums that this rank computed for its own samples, in the order of ``Placement.own_sums``.
            out_BFW: output: the vector of every table. Each vector is contiguous; the outer strides are arbitrary.
        """

    def gradients(self, gradient_BX: Tensor) -> Tensor:
        """Return the gradients of the sums of this rank's shards: (N, K, W), the samples rank by rank.

        Args:
            gradient_BX: gradient of x0, contiguous: the bottom's vector, then one vector per table.
        """


def all_to_all(
    received: Tensor, sent: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None
) -> None:
    """Send each rank of the group its piece.

    Args:
        received, sent: one-dimensional.
        receive, send: number of elements of each rank's piece.
        group: the ranks; None for a single rank.
    """
    if group is None:
        received.copy_(sent)
    else:
        dist.all_to_all_single(received, sent, receive, send, group=group)


class Exchange:
    """A :class:`VectorExchange` in which every rank sends directly to every other rank.

    Args:
        plan: placement of the tables over the ranks of the group.
        group: the ranks; None for a single rank.
        ops: implementation that adds up parts.

    Attributes:
        bags: bags of the shards, over the ids that :meth:`ids` returns; None if there are no shards.
    """

    def __init__(
        self, plan: Placement, rank: int, group: dist.ProcessGroup | None, ops: EmbeddingBags, device: torch.device
    ) -> None:
        self._plan, self._group, self._ops, self._device = plan, group, ops, device
        self._shards_of = [plan.shards_of(other) for other in range(plan.ranks)]
        self.shards = self._shards_of[rank]
        self._lookups_of = [sum(self._hotness(shard) for shard in shards) for shards in self._shards_of]
        self._own_lookups = self._lookups_of[rank]
        self.bags = self._bags(self.shards)
        tables = plan.tables
        columns = [
            tables.columns[shard.table] + index
            for shards in self._shards_of
            for shard in shards
            for index in range(self._hotness(shard))
        ]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._positions_of: dict[int, ReceivedVectors] = {}

    def ids(self, ids_BL: Tensor) -> Tensor:
        """Return all ranks' ids (N, lookups) for this rank's tables; see :meth:`VectorExchange.ids`."""
        batch, ranks = len(ids_BL), self._plan.ranks
        # Transpose, so that the ids for one rank are contiguous.
        sent = ids_BL.t().contiguous().index_select(0, self._columns).flatten()
        received = sent.new_empty(ranks * self._own_lookups * batch)
        counts = [lookups * batch for lookups in self._lookups_of]
        all_to_all(received, sent, [self._own_lookups * batch] * ranks, counts, self._group)
        received_GLB = received.view(ranks, self._own_lookups, batch)
        return received_GLB.transpose(1, 2).reshape(ranks * batch, self._own_lookups)

    def vectors(self, own_NKW: Tensor, replicated_BDW: Tensor, out_BFW: Tensor) -> None:
        """Send sums of rows to the ranks that have the samples; write (B, F, W); see :meth:`VectorExchange.vectors`."""
        batch, _, width = out_BFW.shape
        counts = [len(shards) * batch * width for shards in self._shards_of]
        parts = own_NKW.new_empty(sum(counts) + replicated_BDW.numel())
        own = [len(self.shards) * batch * width] * self._plan.ranks
        all_to_all(parts[: sum(counts)], own_NKW.flatten(), counts, own, self._group)
        parts[sum(counts) :].view_as(replicated_BDW).copy_(replicated_BDW)
        positions = self._positions(batch)
        self._ops.pool(parts.view(-1, width), positions.parts_BP, positions.sums, out_BFW)

    def gradients(self, gradient_BX: Tensor) -> Tensor:
        """Return the gradients (N, K, W) of this rank's sums; see :meth:`VectorExchange.gradients`."""
        batch, width = len(gradient_BX), self._plan.tables.width
        shards, ranks = len(self.shards), self._plan.ranks
        positions, counts = self._positions(batch), [len(shards) * batch * width for shards in self._shards_of]
        sent = gradient_BX.view(-1, width).index_select(0, positions.sent_M[: sum(counts) // width]).flatten()
        received = sent.new_empty(ranks * shards * batch * width)
        all_to_all(received, sent, [shards * batch * width] * ranks, counts, self._group)
        return received.view(ranks * batch, shards, width)

    def _bags(self, shards: tuple[TableShard, ...]) -> Bags | None:
        tables, bags = self._plan.tables, []
        column = base = 0
        for shard in shards:
            table = tables.tables[shard.table]
            bags.append(Bag(column, table.hotness, base, table.rows, shard.shard, shard.shards))
            column, base = column + table.hotness, base + shard.rows(tables)
        return Bags(bags, self._device) if bags else None

    def _hotness(self, shard: TableShard) -> int:
        return self._plan.tables.tables[shard.table].hotness

    def _positions(self, batch: int) -> ReceivedVectors:
        """Return the positions for a batch size. Warm-up creates them, because they cannot be made inside a capture."""
        if batch not in self._positions_of:
            senders = [[shard.table for shard in shards] for shards in self._shards_of]
            senders.append(list(self._plan.own_sums))  # this rank itself, after all others
            self._positions_of[batch] = received_vectors(batch, len(self._plan.tables), senders, 1, self._device)
        return self._positions_of[batch]
