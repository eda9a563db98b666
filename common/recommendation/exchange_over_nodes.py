"""Exchange of ranks on several nodes, in two steps, so that one vector per sample and table crosses nodes.

The ranks with the same position in each node are a rail; the ranks of a node are neighbours. Ids go along the rail to
the nodes that have their tables, and from there to all neighbours. Sums of rows are first added up among the
neighbours, each of which receives those of its rail's samples; the result is one vector along the rail. Gradients
take the reverse way.

Shapes: see :mod:`common.recommendation.exchange`; A nodes, R ranks of a node, U tables with shards on this node.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.layout import Layout
from common.ops.embedding_bags import Bag, Bags, EmbeddingBags
from common.recommendation.exchange import (
    ReceivedVectors,
    Targets,
    all_to_all,
    received_vectors,
    targets_of_collectives,
)
from common.recommendation.placement import Placement


def pays(plan: Placement, ranks_per_node: int) -> bool:
    """Return whether there are several complete nodes, and a table has several shards on one of them."""
    if not 1 < ranks_per_node < plan.ranks or plan.ranks % ranks_per_node:
        return False
    return any(len({rank // ranks_per_node for rank in ranks}) < len(ranks) for ranks in plan.holders)


class ExchangeOverNodes:
    """A :class:`common.recommendation.exchange.VectorExchange` along rails and among neighbours.

    Args:
        layout: the ranks, on its ``dp`` axis.
        ranks_per_node: R, which must divide the number of ranks.
        ops: implementation that adds up parts.
        dtype: dtype of the vectors.

    Attributes:
        bags: bags of the shards, over the ids that :meth:`ids` returns; None if there are no shards.
    """

    def __init__(
        self, plan: Placement, layout: Layout, ranks_per_node: int, ops: EmbeddingBags, dtype: torch.dtype
    ) -> None:
        self._plan, self._ops, self._device = plan, ops, layout.device
        self._like = torch.empty(0, dtype=dtype, device=layout.device)
        self._neighbours = layout.subgroup("dp", ranks_per_node)
        self._rail = layout.across("dp", ranks_per_node)
        self._ranks, self._nodes = ranks_per_node, plan.ranks // ranks_per_node
        own, first = layout.rank // ranks_per_node, layout.rank - layout.rank % ranks_per_node
        nodes = [range(node * ranks_per_node, (node + 1) * ranks_per_node) for node in range(self._nodes)]
        tables = range(len(plan.tables))
        self._tables_of = [[t for t in tables if set(plan.holders[t]) & set(node)] for node in nodes]
        self._tables = self._tables_of[own]
        self._shards_of = [plan.shards_of(rank) for rank in range(first, first + ranks_per_node)]
        self.shards = plan.shards_of(layout.rank)
        sizes = plan.tables.tables
        self._lookups_of = [sum(sizes[table].hotness for table in found) for found in self._tables_of]
        self._lookups = self._lookups_of[own]
        self.bags = self._own_bags()
        columns = [
            plan.tables.columns[table] + index
            for found in self._tables_of
            for table in found
            for index in range(sizes[table].hotness)
        ]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=layout.device)
        self._positions_of: dict[int, tuple[ReceivedVectors, ReceivedVectors]] = {}

    def ids(self, ids_BL: Tensor) -> Tensor:
        """Return all ranks' ids (N, lookups) for this rank's tables.

        See :meth:`common.recommendation.exchange.VectorExchange.ids`.
        """
        batch, lookups = len(ids_BL), self._lookups
        sent = ids_BL.t().contiguous().index_select(0, self._columns).flatten()
        along = sent.new_empty(self._nodes * lookups * batch)
        counts = [n * batch for n in self._lookups_of]
        all_to_all(along, sent, [lookups * batch] * self._nodes, counts, self._rail)
        everyones = along.new_empty(self._ranks * len(along))
        dist.all_gather_into_tensor(everyones, along, group=self._neighbours)
        everyones_RALB = everyones.view(self._ranks, self._nodes, lookups, batch)
        return everyones_RALB.permute(1, 0, 3, 2).reshape(-1 if lookups else self._plan.ranks * batch, lookups)

    def targets(self, batch: int) -> Targets:
        """Return where to write the sums of rows.

        See :meth:`common.recommendation.exchange.VectorExchange.targets`.
        """
        return targets_of_collectives(self._plan, batch, len(self.shards), self._positions(batch)[1], self._like)

    def vectors(self, targets: Targets) -> None:
        """Send sums of rows to the ranks that have the samples.

        See :meth:`common.recommendation.exchange.VectorExchange.vectors`.
        """
        assert isinstance(targets.own, Tensor)
        own_NKW, batch, width = targets.own, len(targets.x0_BX), self._plan.tables.width
        inner, _ = self._positions(batch)
        shards, rail_samples = len(self.shards), self._nodes * batch
        sent = own_NKW.view(self._nodes, self._ranks, batch * shards * width).transpose(0, 1).flatten()
        counts = [len(found) * rail_samples * width for found in self._shards_of]
        parts = own_NKW.new_empty(sum(counts))
        all_to_all(parts, sent, counts, [shards * rail_samples * width] * self._ranks, self._neighbours)
        sums_SUW = own_NKW.new_empty(rail_samples, len(self._tables), width)
        if inner.sums is not None:
            self._ops.pool(parts.view(-1, width), inner.parts_BP, inner.sums, sums_SUW)
        counts = [len(found) * batch * width for found in self._tables_of]
        own = [len(self._tables) * batch * width] * self._nodes
        all_to_all(targets.part_VW.view(-1)[: sum(counts)], sums_SUW.flatten(), counts, own, self._rail)
        targets.add_up(self._ops)

    def gradients(self, gradient_BX: Tensor) -> Tensor:
        """Return the gradients (N, K, W) of this rank's sums.

        See :meth:`common.recommendation.exchange.VectorExchange.gradients`.
        """
        batch, width = len(gradient_BX), self._plan.tables.width
        inner, outer = self._positions(batch)
        counts = [len(found) * batch * width for found in self._tables_of]
        sent = gradient_BX.view(-1, width).index_select(0, outer.sent_M[: sum(counts) // width]).flatten()
        own = len(self._tables) * batch * width
        along = sent.new_empty(self._nodes * own)
        all_to_all(along, sent, [own] * self._nodes, counts, self._rail)
        sent = along.view(-1, width).index_select(0, inner.sent_M).flatten()
        shards, rail_samples = len(self.shards), self._nodes * batch
        received = sent.new_empty(self._ranks * shards * rail_samples * width)
        counts = [len(found) * rail_samples * width for found in self._shards_of]
        all_to_all(received, sent, [shards * rail_samples * width] * self._ranks, counts, self._neighbours)
        received_RAV = received.view(self._ranks, self._nodes, batch * shards * width)
        return received_RAV.transpose(0, 1).reshape(self._plan.ranks * batch, shards, width)

    def _own_bags(self) -> Bags | None:
        tables, bags = self._plan.tables, []
        column, columns = 0, {}
        for table in self._tables:
            columns[table], column = column, column + tables.tables[table].hotness
        base = 0
        for shard in self.shards:
            size = tables.tables[shard.table]
            bags.append(Bag(columns[shard.table], size.hotness, base, size.rows, shard.shard, shard.shards))
            base += shard.rows(tables)
        return Bags(bags, self._device) if bags else None

    def _positions(self, batch: int) -> tuple[ReceivedVectors, ReceivedVectors]:
        """Return the positions among neighbours and along the rail. Warm-up creates them, not a capture."""
        if batch not in self._positions_of:
            number = {table: index for index, table in enumerate(self._tables)}
            among = [[number[shard.table] for shard in shards] for shards in self._shards_of]
            inner = received_vectors(self._nodes * batch, len(self._tables), among, 0, self._device)
            senders = [*self._tables_of, list(self._plan.own_sums)]  # this rank itself, after all nodes
            outer = received_vectors(batch, len(self._plan.tables), senders, 1, self._device)
            self._positions_of[batch] = inner, outer
        return self._positions_of[batch]
