"""What ranks send each other: ids to those that hold the rows, sums of rows back, and the sums' gradients the same way.

Every rank has samples of its own and shards of tables. It sends the owners of shards all ids of their tables; an owner
leaves out those of other shards. It sums rows for the samples of all ranks and sends each rank its samples' sums. Who
receives them adds up what several owners found for one table. All sizes follow from plan and batch: nothing is counted,
and nothing can overflow.

Legend: B samples of this rank, G ranks, N = G B, L ids of a sample, F tables, K shards of this rank, J shards of all
ranks, D replicated tables, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.ops.embedding_bags import Bag, Bags, EmbeddingBags
from common.recommendation.placement import Plan, Shard


@dataclass(frozen=True)
class _Places:
    """Where vectors lie for a batch size.

    Attributes:
        parts_BP: int32, the rows of what was received and found here that make up each table's vector, table by table.
        sums: the bags of these rows.
        vectors_M: int64, for every vector that goes to an owner its place among the (B, 1 + F) of x0.
    """

    parts_BP: Tensor
    sums: Bags
    vectors_M: Tensor


class Exchange:
    """The collectives of one rank; every rank of the group calls the same ones in the same order.

    Args:
        plan: of the tables, over the ranks of the group.
        rank: of this process in the group.
        group: the ranks; None for one alone.
        ops: the implementation that adds up parts.
        device: of all tensors.

    Attributes:
        shards: of this rank.
        bags: of the shards, over the ids that :meth:`ids` returns; None where there are none.
    """

    def __init__(
        self, plan: Plan, rank: int, group: dist.ProcessGroup | None, ops: EmbeddingBags, device: torch.device
    ) -> None:
        self._plan, self._group, self._ops, self._device = plan, group, ops, device
        self._shards_of = [plan.shards_of(other) for other in range(plan.ranks)]
        self.shards = self._shards_of[rank]
        self._lookups_of = [sum(self._hotness(shard) for shard in shards) for shards in self._shards_of]
        self._own_lookups = self._lookups_of[rank]
        self.bags = self._bags(self.shards)
        tables = plan.tables
        columns = [
            tables.columns[shard.table] + place
            for shards in self._shards_of
            for shard in shards
            for place in range(self._hotness(shard))
        ]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._places: dict[int, _Places] = {}

    def ids(self, ids_BL: Tensor) -> Tensor:
        """The ids of all ranks' samples for the tables of this rank's shards.

        Args:
            ids_BL: int32.

        Returns:
            int32 (N, ids of these tables), the samples rank by rank.
        """
        batch, ranks = len(ids_BL), self._plan.ranks
        # Transposed, what goes to a rank is one piece.
        sent = ids_BL.t().index_select(0, self._columns).flatten()
        received = sent.new_empty(ranks * self._own_lookups * batch)
        self._all_to_all(received, sent, [self._own_lookups * batch] * ranks, [n * batch for n in self._lookups_of])
        received_GLB = received.view(ranks, self._own_lookups, batch)
        return received_GLB.transpose(1, 2).reshape(ranks * batch, self._own_lookups)

    def vectors(self, own_NKW: Tensor, replicated_BDW: Tensor, out_BFW: Tensor) -> None:
        """Bring the sums of rows to the ranks that have the samples.

        Args:
            own_NKW: sums of this rank's shards, contiguous.
            replicated_BDW: those of the replicated tables.
            out_BFW: written: the vector of every table; dense vectors any distance apart.
        """
        batch, _, width = out_BFW.shape
        counts = [len(shards) * batch * width for shards in self._shards_of]
        parts = own_NKW.new_empty(sum(counts) + replicated_BDW.numel())
        received = parts[: sum(counts)]
        self._all_to_all(received, own_NKW.flatten(), counts, [len(self.shards) * batch * width] * self._plan.ranks)
        parts[sum(counts) :].view_as(replicated_BDW).copy_(replicated_BDW)
        places = self._places_of(batch)
        self._ops.pool(parts.view(-1, width), places.parts_BP, places.sums, out_BFW)

    def gradients(self, gradient_BX: Tensor) -> Tensor:
        """The gradients of the sums of this rank's shards.

        Args:
            gradient_BX: of x0, contiguous: the bottom's vector, and one of every table.

        Returns:
            (N, K, W), the samples rank by rank.
        """
        batch, width = len(gradient_BX), self._plan.tables.width
        sent = gradient_BX.view(-1, width).index_select(0, self._places_of(batch).vectors_M).flatten()
        own = len(self.shards) * batch * width
        received = sent.new_empty(self._plan.ranks * own)
        counts = [len(shards) * batch * width for shards in self._shards_of]
        self._all_to_all(received, sent, [own] * self._plan.ranks, counts)
        return received.view(self._plan.ranks * batch, len(self.shards), width)

    def _all_to_all(self, received: Tensor, sent: Tensor, receive: list[int], send: list[int]) -> None:
        if self._group is None:
            received.copy_(sent)
        else:
            dist.all_to_all_single(received, sent, receive, send, group=self._group)

    def _bags(self, shards: tuple[Shard, ...]) -> Bags | None:
        bags: list[Bag] = []
        column = base = 0
        for shard in shards:
            table = self._plan.tables.tables[shard.table]
            bags.append(Bag(column, table.hotness, base, table.rows, shard.shard, shard.shards))
            column, base = column + table.hotness, base + shard.rows(self._plan.tables)
        return Bags(bags, self._device) if bags else None

    def _hotness(self, shard: Shard) -> int:
        return self._plan.tables.tables[shard.table].hotness

    def _places_of(self, batch: int) -> _Places:
        """Made outside of captures: warm-up meets every batch size first."""
        if batch not in self._places:
            self._places[batch] = self._place(batch)
        return self._places[batch]

    def _place(self, batch: int) -> _Places:
        tables, replicated = len(self._plan.tables), self._plan.replicated
        sample_B = torch.arange(batch, dtype=torch.int64)
        parts: list[list[Tensor]] = [[] for _ in range(tables)]
        vectors: list[Tensor] = []
        before = 0
        for shards in self._shards_of:
            for number, shard in enumerate(shards):
                parts[shard.table].append(before + sample_B * len(shards) + number)
            if shards:
                vector_K = torch.tensor([1 + shard.table for shard in shards])
                vectors.append((sample_B.unsqueeze(1) * (1 + tables) + vector_K).flatten())
            before += batch * len(shards)
        for number, table in enumerate(replicated):
            parts[table].append(before + sample_B * len(replicated) + number)
        rows = before + batch * len(replicated)
        bags: list[Bag] = []
        for found in parts:
            bags.append(Bag(sum(bag.hotness for bag in bags), len(found), 0, rows))
        flat = [part for found in parts for part in found]
        return _Places(
            torch.stack(flat, 1).to(self._device, torch.int32),
            Bags(bags, self._device),
            torch.cat(vectors).to(self._device) if vectors else torch.empty(0, dtype=torch.int64, device=self._device),
        )
