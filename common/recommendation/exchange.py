"""Exchange between ranks: ids to the ranks that hold the rows, sums of rows back, and gradients of the sums.

Every rank has different samples and different shards of tables. It sends all ids of a table to every owner of a shard
of it; the owner ignores ids of other shards, sums rows for the samples of all ranks, and sends each rank the sums of
its samples. The receiver adds up the sums of several owners of one table. All sizes follow from plan and batch, so
nothing can overflow. Rare rows of hybrid tables are exchanged differently (:mod:`common.recommendation.rare_rows`).

A :class:`Transport` moves the data: collectives, or writes to memory that the ranks map from each other
(:mod:`common.recommendation.peer_transport`).

Shapes: B samples of this rank, G ranks, N = G B, L ids of a sample, F tables, K shards of this rank, J shards of all
ranks, D sums that a rank computes for its own samples (:attr:`common.recommendation.placement.Placement.own_sums`), W
width, H hybrid tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from common.ops.embedding_bags import Bag, Bags, EmbeddingBags, PeerVectors
from common.recommendation.placement import Placement, TableShard


@dataclass(frozen=True)
class ReceivedVectors:
    """Positions of the received vectors of B samples, and which of them add up to one vector.

    Attributes:
        parts_BP: int32, rows of the received buffer that add up to the vectors of a sample, table by table.
        sums: bags of these rows, one per table; None without tables.
        sent_M: int64, for every vector that goes back to a sender, sender by sender and sample by sample, its row
            among the vectors of all samples.
        vectors: number of received vectors.
    """

    parts_BP: Tensor
    sums: Bags | None
    sent_M: Tensor
    vectors: int


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
    return ReceivedVectors(parts_BP, Bags(bags, device) if bags else None, torch.cat(sent).to(device), before)


@dataclass(frozen=True, eq=False)
class Targets:
    """Memory for the sums of a lookup, and how they become x0.

    Attributes:
        x0_BX: the result. Its first W columns are reserved for the bottom's vector.
        own: output for the sums of this rank's shards for the samples of all ranks, (N, K, W).
        everywhere: output for the sums of the tables of ``Placement.everywhere`` for this rank's samples.
        rare_BHW: output for the sums of hybrid tables for this rank's samples, in the order of the tables.
        part_VW: V vectors for this rank's samples that are to be added up.
        parts_BP: rows of ``part_VW`` that add up to the vectors of a sample.
        sums: bags of these rows; None if no vectors are to be added.
        out: output for the added vectors: views of ``x0_BX``.
    """

    x0_BX: Tensor
    own: Tensor | PeerVectors
    everywhere: Tensor | PeerVectors
    rare_BHW: Tensor
    part_VW: Tensor
    parts_BP: Tensor
    sums: Bags | None
    out: Tensor | PeerVectors

    def add_up(self, ops: EmbeddingBags) -> None:
        """Complete the vectors of x0 when all parts have arrived."""
        if self.sums is not None:
            ops.pool(self.part_VW, self.parts_BP, self.sums, self.out)


def targets_of_collectives(
    plan: Placement, batch: int, shards: int, received: ReceivedVectors, like: Tensor
) -> Targets:
    """Return targets in the memory of this rank alone, from which collectives send and into which they receive.

    Args:
        shards: shards of this rank.
        received: positions of all parts, first those that are received, then the sums that this rank has computed.
        like: tensor with the dtype and the device of the vectors.
    """
    width, tables, own = plan.tables.width, len(plan.tables), len(plan.own_sums)
    x0_BX = like.new_empty(batch, (1 + tables) * width)
    part_VW = like.new_empty(received.vectors, width)
    replicated_BDW = part_VW[received.vectors - batch * own :].view(batch, own, width)
    here = len(plan.everywhere)
    return Targets(
        x0_BX,
        like.new_empty(plan.ranks * batch, shards, width),
        replicated_BDW[:, :here],
        replicated_BDW[:, here:],
        part_VW,
        received.parts_BP,
        received.sums,
        x0_BX.view(batch, 1 + tables, width)[:, 1:],
    )


class VectorExchange(Protocol):
    """Interface of an exchange; every rank of the group calls the same methods in the same order.

    Each micro-batch calls :meth:`targets`, :meth:`ids` and :meth:`vectors`, and in training :meth:`gradients`. Targets
    and gradients are valid until the next micro-batch.
    """

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

    def targets(self, batch: int) -> Targets:
        """Return where to write the sums of rows. Warm-up calls it first, because it may copy to the device."""

    def vectors(self, targets: Targets) -> None:
        """Send the sums of rows to the ranks that have the samples, and complete the vectors of ``targets.x0_BX``."""

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


Rows = Literal["ids", "gradients"]
"""Kind of rows that :meth:`Transport.send` sends."""


class Transport(Protocol):
    """Movement of data in :class:`Exchange`."""

    def send(self, what: Rows, source_SW: Tensor, index_M: Tensor, send: list[int], receive: int) -> Tensor:
        """Send the rows ``source_SW[index_M]``, the first ``send[0]`` of them to rank 0, and so on.

        Args:
            source_SW: contiguous.
            index_M: int64.
            receive: number of rows that each rank sends to this rank.

        Returns:
            The received rows (ranks * ``receive``, W), sender by sender.
        """

    def targets(self, batch: int, received: ReceivedVectors) -> Targets:
        """Return where to write the sums of rows of a lookup.

        Args:
            received: positions of the vectors if each rank sends all sums of its shards.
        """

    def deliver(self, targets: Targets) -> None:
        """Bring the sums of shards to the ranks that have the samples, and wait for those of other ranks."""


class Collectives:
    """A :class:`Transport` by collectives.

    Args:
        plan: placement of the tables over the ranks of the group.
        group: the ranks; None for a single rank.
        like: tensor with the dtype and the device of the vectors.
    """

    def __init__(self, plan: Placement, rank: int, group: dist.ProcessGroup | None, like: Tensor) -> None:
        self._plan, self._group, self._like = plan, group, like
        self._counts = [len(plan.shards_of(other)) for other in range(plan.ranks)]
        self._own = self._counts[rank]

    def send(self, what: Rows, source_SW: Tensor, index_M: Tensor, send: list[int], receive: int) -> Tensor:
        """Send rows to all ranks; see :meth:`Transport.send`."""
        ranks, width = self._plan.ranks, source_SW.shape[1]
        sent = source_SW.index_select(0, index_M).flatten()
        received = sent.new_empty(ranks * receive * width)
        all_to_all(received, sent, [receive * width] * ranks, [count * width for count in send], self._group)
        return received.view(-1, width)

    def targets(self, batch: int, received: ReceivedVectors) -> Targets:
        """Return targets in the memory of this rank; see :meth:`Transport.targets`."""
        return targets_of_collectives(self._plan, batch, self._own, received, self._like)

    def deliver(self, targets: Targets) -> None:
        """Send the sums to all ranks; see :meth:`Transport.deliver`."""
        assert isinstance(targets.own, Tensor)
        elements = len(targets.x0_BX) * self._plan.tables.width
        counts = [count * elements for count in self._counts]
        received = targets.part_VW.view(-1)[: sum(counts)]
        own = [self._own * elements] * self._plan.ranks
        all_to_all(received, targets.own.flatten(), counts, own, self._group)


class Exchange:
    """A :class:`VectorExchange` in which every rank sends directly to every other rank.

    Args:
        plan: placement of the tables over the ranks.
        ops: implementation that adds up parts.

    Attributes:
        bags: bags of the shards, over the ids that :meth:`ids` returns; None if there are no shards.
    """

    def __init__(
        self, plan: Placement, rank: int, transport: Transport, ops: EmbeddingBags, device: torch.device
    ) -> None:
        self._plan, self._transport, self._ops, self._device = plan, transport, ops, device
        self._shards_of = [plan.shards_of(other) for other in range(plan.ranks)]
        self.shards = self._shards_of[rank]
        self._lookups_of = [plan.ids_of(other) for other in range(plan.ranks)]
        self._own_lookups = self._lookups_of[rank]
        self.bags = self._bags(self.shards)
        tables = plan.tables
        columns = [
            tables.columns[shard.table] + index
            for shards in self._shards_of
            for shard in shards
            for index in range(tables.tables[shard.table].hotness)
        ]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._positions_of: dict[int, ReceivedVectors] = {}

    def ids(self, ids_BL: Tensor) -> Tensor:
        """Return all ranks' ids (N, lookups) for this rank's tables; see :meth:`VectorExchange.ids`."""
        batch, ranks, lookups = len(ids_BL), self._plan.ranks, self._own_lookups
        # Transpose, so that the ids for one rank are contiguous.
        received = self._transport.send("ids", ids_BL.t().contiguous(), self._columns, self._lookups_of, lookups)
        received_GLB = received.view(ranks, lookups, batch)
        # A copy even of one column, because the next micro-batch may overwrite the received ids.
        own_GBL = received_GLB.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return own_GBL.view(ranks * batch, lookups)

    def targets(self, batch: int) -> Targets:
        """Return where to write the sums of rows; see :meth:`VectorExchange.targets`."""
        return self._transport.targets(batch, self._positions(batch))

    def vectors(self, targets: Targets) -> None:
        """Send sums of rows to the ranks that have the samples; see :meth:`VectorExchange.vectors`."""
        self._transport.deliver(targets)
        targets.add_up(self._ops)

    def gradients(self, gradient_BX: Tensor) -> Tensor:
        """Return the gradients (N, K, W) of this rank's sums; see :meth:`VectorExchange.gradients`."""
        batch, width, shards = len(gradient_BX), self._plan.tables.width, len(self.shards)
        counts = [len(shards) * batch for shards in self._shards_of]
        index_M = self._positions(batch).sent_M[: sum(counts)]
        received = self._transport.send("gradients", gradient_BX.view(-1, width), index_M, counts, shards * batch)
        return received.view(self._plan.ranks * batch, shards, width)

    def _bags(self, shards: tuple[TableShard, ...]) -> Bags | None:
        tables, bags = self._plan.tables, []
        column = base = 0
        for shard in shards:
            table = tables.tables[shard.table]
            bags.append(Bag(column, table.hotness, base, table.rows, shard.shard, shard.shards))
            column, base = column + table.hotness, base + shard.rows(tables)
        return Bags(bags, self._device) if bags else None

    def _positions(self, batch: int) -> ReceivedVectors:
        """Return the positions for a batch size. Warm-up creates them, because they cannot be made inside a capture."""
        if batch not in self._positions_of:
            senders = [[shard.table for shard in shards] for shards in self._shards_of]
            senders.append(list(self._plan.own_sums))  # this rank itself, after all others
            self._positions_of[batch] = received_vectors(batch, len(self._plan.tables), senders, 1, self._device)
        return self._positions_of[batch]
