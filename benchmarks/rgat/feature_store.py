"""Stores of features: rows of e4m3 numbers, one for each node, which a device gathers for a sampled block.

Rows are read in place, or exchanged: a shard is on every rank, also of several nodes, and ranks send rows to the ranks
that request them. For an exchange, a block's nodes are sorted by the rank that owns their rows. Ranks exchange the
numbers of rows as soon as the block is sampled. The numbers reach the host before the rows are gathered, one step
later, so nothing waits for the device. Row numbers are sent to the owners, and rows back; both ends use the kernel
that reads shards in place. Rows from ranks of the same node are sent too, although they could be read over NVLink.

Shapes: N node entries of a block, F features of a node, S ranks, T types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock, Schema
from benchmarks.rgat.ops import gather_rows
from benchmarks.rgat.ops.gather_rows import LARGEST, ShardedRows
from benchmarks.rgat.prepared import features_name
from benchmarks.rgat.sharded import (
    EXCHANGE,
    HOST,
    LOCAL,
    PEERS,
    MemoryBytes,
    NodePartition,
    Ranks,
    RowLoader,
    ShardedArray,
    candidates,
    first_supported,
)
from common.data.direct_rows import DirectRows
from common.distributed import groups
from common.distributed.layout import Layout
from common.ops.operation import AUTO, OperationRequest

E4M3 = torch.float8_e4m3fn

Fill = Callable[[NodePartition, int, Tensor], None]
"""Function that writes a shard: (partition, index of the shard, its rows [partition.rows, F])."""


class FeatureStore(Protocol):
    """Rows of features. Must be used on one stream, or on several that wait for one another.

    Attributes:
        name: ``local``, ``peers``, ``host`` or ``exchange``.
    """

    name: str
    width: int

    def plan(self, block: SampledBlock) -> Any:
        """Return the ``plan`` for :meth:`gather` of a sampled block. Must run on all ranks in the same order."""
        ...

    def gather(self, block: SampledBlock, plan: Any, out_NF: Tensor) -> None:
        """Copy the rows of all nodes of the block; unfilled entries stay unchanged.

        Args:
            plan: result of :meth:`plan` for this block.
            out_NF: output in e4m3, [shape.node_offsets(H)[-1], F].
        """
        ...

    def close(self) -> None:
        """Free the memory after the device has completed its queued work."""
        ...


def open_features(
    root: Path,
    schema: Schema,
    nodes: tuple[int, ...],
    width: int,
    placement: str,
    layout: Layout,
    ranks_per_node: int,
) -> FeatureStore:
    """Return the features of a prepared folder. Collective.

    Each rank reads only its shard; with ``local`` every rank reads all rows. For arguments and further errors see
    :func:`build_features`.

    Raises:
        DataError: a file is missing or damaged, or has another dtype or shape.
    """

    def fill(partition: NodePartition, shard: int, own_RF: Tensor) -> None:
        with RowLoader(layout.device) as loader:
            for number, (name, begin) in enumerate(zip(schema.types, partition.first_rows, strict=True)):
                first, last = partition.share(number, shard)
                with DirectRows.from_npy(root / features_name(name), E4M3, (width,), nodes[number]) as rows:
                    for _ in loader.copy(rows, first, last, own_RF[begin : begin + last - first]):
                        pass

    return build_features(nodes, width, placement, layout, ranks_per_node, fill)


def build_features(
    nodes: tuple[int, ...], width: int, placement: str, layout: Layout, ranks_per_node: int, fill: Fill
) -> FeatureStore:
    """Return a feature store whose shards ``fill`` writes. Collective.

    Args:
        nodes: number of nodes of each type.
        placement: see :mod:`benchmarks.rgat.sharded`. ``auto``: a single rank uses local, or host if that does not
            fit. Ranks of one node use the first of peers, exchange and host that fits in free memory; peers also
            requires that GPUs can map each other's memory. Several nodes use exchange. Except with local, each row is
            read by one rank.
        layout: ranks that hold the features.
        ranks_per_node: number of these ranks on each node.
        fill: called once, with this rank's shard.

    Raises:
        ConfigError: the features do not fit in the requested placement, or in any.
        UnsupportedImplementation: the requested placement needs mapped memory of other GPUs, which is unavailable.
    """
    ranks = Ranks(layout.world_size, ranks_per_node, layout.device.type == "cuda")
    free = MemoryBytes.free(layout)
    names = candidates(
        "features", placement, order_of(ranks), ranks, free, lambda shards: NodePartition(nodes, shards).rows * width
    )

    def build(name: str) -> FeatureStore:
        partition = NodePartition(nodes, ranks.shards(name))
        # A separate communicator, so that concurrent traffic of training does not wait for it.
        exchange = groups.make(range(layout.world_size)) if name == EXCHANGE else None
        group = layout.node(ranks_per_node) if name in (PEERS, HOST) else None
        memory = ShardedArray(LOCAL if name == EXCHANGE else name, partition.rows * width, group, layout.device)
        fill(partition, layout.rank % partition.shards, memory.own.view(-1, width).view(E4M3))
        memory.share()
        if exchange is not None:
            return ExchangedFeatures(partition, memory.own.view(-1, width), exchange)
        return InPlaceFeatures(name, partition, memory, width, layout.device)

    return first_supported("features", names, build)


def order_of(ranks: Ranks) -> tuple[str, ...]:
    """Return the placements that ``auto`` tries, in this order."""
    if ranks.count == 1:
        return LOCAL, HOST
    # The rules let only one rank read a row, and forbid copies (training_rules.adoc, node classification).
    return (PEERS, EXCHANGE, HOST) if ranks.count <= ranks.per_node else (EXCHANGE,)


class InPlaceFeatures:
    """Feature store whose shards the device reads in place.

    Args:
        memory: shards of ``partition.rows`` rows.
    """

    def __init__(
        self, name: str, partition: NodePartition, memory: ShardedArray, width: int, device: torch.device
    ) -> None:
        self.name, self.width = name, width
        shards = tuple(shard.view(-1, width) for shard in memory.shards)
        self._rows = ShardedRows(shards, partition.rows_per_shard, partition.first_rows, device)
        self._memory = memory
        self._gather = gather_rows.GATHER_ROWS.select(AUTO, OperationRequest(device, torch.uint8)).function

    def plan(self, block: SampledBlock) -> None:
        """Do nothing: rows are read in place."""

    def gather(self, block: SampledBlock, plan: None, out_NF: Tensor) -> None:
        """Implement :class:`FeatureStore`."""
        hops = block.shape.hops
        offsets, out_NB = block.shape.node_offsets(hops), out_NF.view(torch.uint8)
        self._gather(self._rows, block.nodes, block.node_counts[hops], offsets, out_NB)

    def close(self) -> None:
        """Implement :class:`FeatureStore`."""
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)
        self._memory.close()
        del self._rows, self._memory


@dataclass(frozen=True)
class ExchangePlan:
    """Rows of a block that ranks request from each other.

    Attributes:
        requested: int32, [N]: row numbers in the owners' shards, rank by rank; only as many as ``counts`` says are
            valid.
        row_index: int32, [N]: for each node entry, its index among the received rows.
        received: int32, [1]: number of rows that other ranks request.
        counts: int64, [2, S], on the host after ``ready``: rows requested from each rank, and by each rank.
        ready: event after all of these, on a GPU.
    """

    requested: Tensor
    row_index: Tensor
    received: Tensor
    counts: Tensor
    ready: torch.cuda.Event | None


class ExchangedFeatures:
    """Feature store with one shard per rank. Planning and gathering are collective, in the same order on all ranks.

    ``gather`` waits on the host for the counts of its plan, which are there if it was made one step before. It must
    always run on the same stream. It takes twice the memory of the gathered rows: one buffer for rows to send, one
    for rows to receive. Both grow with the largest block so far.

    Args:
        partition: shards of the nodes, one for each rank of ``group``.
        own: uint8, [partition.rows, F]: this rank's shard.
        group: the ranks; must carry no other traffic.
    """

    name = "exchange"

    def __init__(self, partition: NodePartition, own: Tensor, group: dist.ProcessGroup) -> None:
        self.width = own.shape[1]
        self._partition, self._group = partition, group
        self._device = own.device
        self._shard: ShardedRows | None = ShardedRows((own,), (LARGEST,), (0,), own.device)
        self._gather = gather_rows.GATHER_ROWS.select(AUTO, OperationRequest(own.device, torch.uint8)).function
        self._requests = torch.empty(0, dtype=torch.int32, device=own.device)
        self._replies = own.new_empty(0)
        self._received_rows: ShardedRows | None = None

    def plan(self, block: SampledBlock) -> ExchangePlan:
        """Sort a block's nodes by owner, and send every owner the number of requested rows."""
        owner_N, row_N = self._owners(block)
        sorted_N, order_N = torch.sort(owner_N, stable=True)
        ranks = torch.arange(self._partition.shards + 1, dtype=sorted_N.dtype, device=self._device)
        sent_S = torch.searchsorted(sorted_N, ranks).diff()
        counts = torch.empty((2, self._partition.shards), dtype=torch.int64, device=self._device)
        counts[0] = sent_S
        dist.all_to_all_single(counts[1], counts[0], group=self._group)
        row_index_N = torch.empty_like(row_N)
        row_index_N[order_N] = torch.arange(len(row_N), dtype=torch.int32, device=self._device)
        received = counts[1].sum().int().view(1)
        if self._device.type != "cuda":
            return ExchangePlan(row_N[order_N], row_index_N, received, counts, None)
        on_host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        on_host.copy_(counts, non_blocking=True)
        requested_N, ready = row_N[order_N], torch.cuda.Event()
        ready.record()
        return ExchangePlan(requested_N, row_index_N, received, on_host, ready)

    def gather(self, block: SampledBlock, plan: ExchangePlan, out_NF: Tensor) -> None:
        """Implement :class:`FeatureStore`."""
        assert self._shard is not None, "the store is open"
        self._wait_for(plan)
        out_NB = out_NF.view(torch.uint8)
        sent, received = plan.counts.tolist()
        requests, replies, rows = self._buffers(self._shard, sum(received), sum(sent))
        dist.all_to_all_single(requests, plan.requested[: sum(sent)], received, sent, group=self._group)
        self._gather(self._shard, requests, plan.received, (0, sum(received)), replies)
        dist.all_to_all_single(rows.shards[0][: sum(sent)], replies, sent, received, group=self._group)
        hops = block.shape.hops
        offsets = block.shape.node_offsets(hops)
        self._gather(rows, plan.row_index, block.node_counts[hops], offsets, out_NB)

    def close(self) -> None:
        """Implement :class:`FeatureStore`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._shard = self._received_rows = None
        self._replies = self._replies.new_empty(0)

    def _owners(self, block: SampledBlock) -> tuple[Tensor, Tensor]:
        """Return the owner of each node entry, int16 (S for unfilled entries), and the row in its shard, int32."""
        hops, partition = block.shape.hops, self._partition
        offsets, count_T = block.shape.node_offsets(hops), block.node_counts[hops]
        owner_N = torch.empty(offsets[-1], dtype=torch.int16, device=self._device)
        row_N = torch.empty(offsets[-1], dtype=torch.int32, device=self._device)
        for number, (per_shard, first_row) in enumerate(
            zip(partition.rows_per_shard, partition.first_rows, strict=True)
        ):
            own = slice(offsets[number], offsets[number + 1])
            node = block.nodes[own]
            owner = torch.div(node, per_shard, rounding_mode="floor")
            there = torch.arange(len(node), device=self._device) < count_T[number]
            row_N[own] = node - owner * per_shard + first_row
            owner_N[own] = owner.where(there, partition.shards)
        return owner_N, row_N

    def _wait_for(self, plan: ExchangePlan) -> None:
        if plan.ready is None:
            return
        plan.ready.synchronize()
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(plan.ready)
        for tensor in (plan.requested, plan.row_index, plan.received):
            tensor.record_stream(stream)

    def _buffers(self, shard: ShardedRows, received: int, sent: int) -> tuple[Tensor, Tensor, ShardedRows]:
        """Return reused buffers for row numbers from others, rows to send, and rows to receive."""
        if len(self._requests) <= received:
            self._replies = self._replies.new_empty(0)  # frees its memory before the next allocation
            self._requests = torch.empty(_with_reserve(received), dtype=torch.int32, device=self._device)
            self._replies = torch.empty((len(self._requests), shard.row_bytes), dtype=torch.uint8, device=self._device)
        if self._received_rows is None or len(self._received_rows.shards[0]) <= sent:
            self._received_rows = None
            received_rows = torch.empty((_with_reserve(sent), shard.row_bytes), dtype=torch.uint8, device=self._device)
            types = len(self._partition.nodes)
            self._received_rows = ShardedRows((received_rows,), (LARGEST,) * types, (0,) * types, self._device)
        return self._requests[:received], self._replies[:received], self._received_rows


def _with_reserve(rows: int) -> int:
    """Return a buffer size for ``rows`` rows, with a margin so that slightly larger blocks need no new buffer."""
    return rows + rows // 8 + 1
