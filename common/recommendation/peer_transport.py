"""Exchange of embeddings through memory that the ranks of a machine map from each other, for training.

A lookup writes the sums of a shard directly into x0 of the rank that has the samples. Only vectors with several parts,
of tables with several shards and of hybrid tables, are first written beside x0, and added up there. Ids and gradients
are written into receive buffers of their owners. There are no collectives, and nothing is packed or unpacked.

A micro-batch has three barriers: after its ids, its vectors and its gradients have been written. They also say when
memory is free again:

- x0 and the parts, which the lookup of the next micro-batch overwrites, are read for the last time before the barrier
  after the gradients: the gradient of x0 is known only when the passes have read x0.
- The received ids are copied before the barrier after the vectors, and the peers write ids again after it.
- The received gradients, which the next backward pass overwrites, are read by the update at the latest. The barrier
  after the next vectors follows the update, because their lookup reads the updated rows.

So each lookup must be followed by its gradients, and evaluation, which has none, uses collectives.

Shapes: see :mod:`common.recommendation.exchange`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.symmetric_memory import PeerMemory, attempt
from common.errors import ConfigError
from common.ops.embedding_bags import PeerVectors
from common.recommendation.exchange import ReceivedVectors, Rows, Targets, received_vectors
from common.recommendation.placement import Placement

PEER_MEMORY = "peer_memory"
"""Value of ``embeddings.exchange`` that selects this module."""

ALIGNMENT = 256
"""Bytes at a multiple of which each part of the memory begins."""


class PeerTransport:
    """A :class:`common.recommendation.exchange.Transport` through mapped memory. The constructor is collective.

    Args:
        plan: placement of the tables over the ranks of ``group``.
        group: two or more ranks on one machine.
        batch: samples of a micro-batch.
        dtype: dtype of the vectors and of their gradients.

    Attributes:
        size: bytes of the memory on each rank.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory, or lack it.
    """

    def __init__(
        self, plan: Placement, group: dist.ProcessGroup, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._plan, self._rank, self._batch, self._device = plan, group.rank(), batch, device
        ranks, width, tables = range(plan.ranks), plan.tables.width, len(plan.tables)
        shards_of = [[shard.table for shard in plan.shards_of(rank)] for rank in ranks]
        contributions = Counter(itertools.chain(*shards_of, plan.own_sums))
        rare = [hybrid.table for hybrid in plan.hybrids]
        self._added = [table for table in range(tables) if contributions[table] > 1 or table in rare]
        numbers = {table: number for number, table in enumerate(self._added)}
        senders = [[numbers[table] for table in found if table in numbers] for found in (*shards_of, plan.own_sums)]
        self._parts = received_vectors(batch, len(self._added), senders, 0, device)
        self._first_part = batch * (1 + tables)

        most_ids, most_shards = max(map(plan.ids_of, ranks)), max(map(len, shards_of))
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((plan.ranks, most_ids * batch), torch.int32),
            ((plan.ranks, most_shards * batch * width), dtype),
            ((self._first_part + self._parts.vectors, width), dtype),
        ]
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in shapes]
        starts = list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        self.size = starts[-1]
        self._memory = PeerMemory.allocate(self.size, group, device)
        ids, gradients, self._vectors = (
            self._memory.tensors(*shape, start) for shape, start in zip(shapes, starts, strict=False)
        )
        self._received: dict[Rows, tuple[Tensor, ...]] = {"ids": ids, "gradients": gradients}
        self._address_G = self._memory.addresses + starts[2]

        own, first = senders[-1], self._first_part + self._parts.vectors - batch * len(senders[-1])
        here = len(plan.everywhere)
        self._rare_BHW = self._own_vectors[first:].view(batch, len(own), width)[:, len(own) - len(rare) :]
        before = self._first_part + batch * sum(map(len, senders[: self._rank]))
        self._own = self._output(self._positions(shards_of[self._rank], before), ranks)
        self._everywhere = self._output(self._positions(plan.own_sums[:here], first, len(own)), [self._rank])
        self._out = self._output([(1 + table, 1 + tables) for table in self._added], [self._rank])

    @property
    def _own_vectors(self) -> Tensor:
        return self._vectors[self._rank]

    def _positions(self, tables: Sequence[int], before: int, sent: int | None = None) -> list[tuple[int, int]]:
        """Return first row and stride of the vectors of ``tables``: in x0, or among the parts if these are added.

        Args:
            before: row of the sender's first part.
            sent: number of parts of a sample that the sender writes; None if they are all of ``tables``.
        """
        parts = [table for table in tables if table in self._added]
        stride = len(parts) if sent is None else sent
        x0 = 1 + len(self._plan.tables)
        return [(before + parts.index(table), stride) if table in parts else (1 + table, x0) for table in tables]

    def _output(self, positions: Sequence[tuple[int, int]], ranks: Sequence[int]) -> PeerVectors:
        """Return the output of a lookup for the samples of ``ranks``, which are consecutive."""
        position_B2 = torch.tensor(list(positions), dtype=torch.int32, device=self._device).view(-1, 2)
        buffers = tuple(self._vectors[rank] for rank in ranks)
        return PeerVectors(
            buffers, self._address_G[ranks[0] : ranks[-1] + 1], self._batch, tuple(positions), position_B2
        )

    def send(self, what: Rows, source_SW: Tensor, index_M: Tensor, send: list[int], receive: int) -> Tensor:
        """Write rows into the receive buffers of all ranks; see :meth:`common.recommendation.exchange.Transport.send`.

        The result is part of the memory.
        """
        buffers, pieces = self._received[what], index_M.split(send)
        ranks, width = self._plan.ranks, source_SW.shape[1]
        for distance in range(1, ranks + 1):  # at any time the ranks write to different ones, at last to themselves
            rank = (self._rank + distance) % ranks
            target = buffers[rank].view(-1)[: ranks * len(pieces[rank]) * width].view(ranks, -1, width)
            torch.index_select(source_SW, 0, pieces[rank], out=target[self._rank])
        self._memory.barrier()
        return buffers[self._rank].view(-1)[: ranks * receive * width].view(-1, width)

    def targets(self, batch: int, received: ReceivedVectors) -> Targets:
        """Return targets in the memory of all ranks; see :meth:`common.recommendation.exchange.Transport.targets`.

        Raises:
            ValueError: the micro-batch has another number of samples than the memory is made for.
        """
        if batch != self._batch:
            raise ValueError(f"a micro-batch of {batch} samples, in memory for {self._batch}")
        x0_BX = self._own_vectors[: self._first_part].view(batch, -1)
        # Detached, because autograd lets no view be modified that was made without gradients.
        return Targets(
            x0_BX.detach(),
            self._own,
            self._everywhere,
            self._rare_BHW,
            self._own_vectors[self._first_part :],
            self._parts.parts_BP,
            self._parts.sums,
            self._out,
        )

    def deliver(self, targets: Targets) -> None:
        """Wait until all ranks have written their sums."""
        self._memory.barrier()


def build_peer_transport(
    plan: Placement, group: dist.ProcessGroup, batch: int, dtype: torch.dtype, device: torch.device
) -> PeerTransport:
    """Return a transport for micro-batches of ``batch`` samples. Collective.

    Raises:
        ConfigError: the ranks cannot map each other's memory; the message says why. All ranks raise it.
    """
    transport, reason = attempt(lambda: PeerTransport(plan, group, batch, dtype, device), group, device)
    if transport is None:
        raise ConfigError(f"embeddings.exchange={PEER_MEMORY}: {reason}; use embeddings.exchange=collectives")
    return transport
