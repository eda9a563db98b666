"""Feature store with one shard per rank, which sends rows to the ranks that request them, also across nodes.

A block's nodes are sorted by the rank that owns their rows. Ranks exchange the numbers of rows as soon as the block
is sampled. The numbers reach the host before the rows are gathered, one step later, so nothing waits for the device.
Row numbers are sent to the owners, and rows back; both ends use the kernel that reads shards in place.

Rows from ranks of the same node are sent too, although they could be read in place over NVLink.

Shapes: N node entries of a block, S ranks, T types.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops import gather_rows
from benchmarks.rgat.ops.gather_rows.reference import LARGEST, ShardedRows
from benchmarks.rgat.stores.feature_store import as_bytes
from benchmarks.rgat.stores.partition import Partition
from common.ops.operation import AUTO, OperationRequest


@dataclass(frozen=True)
class ExchangePlan:
    """Rows of a block that ranks request from each other.

    Attributes:
        wanted: int32, [N]: row numbers in the owners' shards, rank by rank; only as many as ``counts`` says are
            valid.
        answer: int32, [N]: for each node entry, its index among the received rows.
        received: int32, [1]: number of rows that other ranks request.
        counts: int64, [2, S], on the host after ``ready``: rows requested from each rank, and by each rank.
        ready: event after all of these, on a GPU.
    """

    wanted: Tensor
    answer: Tensor
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
        own: uint8, [partition.rows, bytes per row]: this rank's shard.
        dtype, width: dtype and number of features of a row.
        group: the ranks; must carry no other traffic.
    """

    name = "exchange"

    def __init__(
        self,
        partition: Partition,
        own: Tensor,
        dtype: torch.dtype,
        width: int,
        group: dist.ProcessGroup,
    ) -> None:
        if partition.shards != group.size() or own.shape != (partition.rows, width * dtype.itemsize):
            raise ValueError(f"{partition} for {group.size()} ranks, and a shard of {tuple(own.shape)}")
        self.dtype, self.width = dtype, width
        self._partition, self._group = partition, group
        self._device = own.device
        self._shard: ShardedRows | None = ShardedRows((own,), (LARGEST,), (0,), own.device)
        self._gather = gather_rows.GATHER_ROWS.select(AUTO, OperationRequest(own.device, torch.uint8)).function
        self._asked = torch.empty(0, dtype=torch.int32, device=own.device)
        self._given = own.new_empty(0)
        self._arrived: ShardedRows | None = None

    def plan(self, block: SampledBlock) -> ExchangePlan:
        """Sort a block's nodes by owner, and send every owner the number of requested rows."""
        owner_N, row_N = self._owners(block)
        sorted_N, order_N = torch.sort(owner_N, stable=True)
        ranks = torch.arange(self._partition.shards + 1, dtype=sorted_N.dtype, device=self._device)
        sent_S = torch.searchsorted(sorted_N, ranks).diff()
        counts = torch.empty((2, self._partition.shards), dtype=torch.int64, device=self._device)
        counts[0] = sent_S
        dist.all_to_all_single(counts[1], counts[0], group=self._group)
        answer_N = torch.empty_like(row_N)
        answer_N[order_N] = torch.arange(len(row_N), dtype=torch.int32, device=self._device)
        received = counts[1].sum().int().view(1)
        if self._device.type != "cuda":
            return ExchangePlan(row_N[order_N], answer_N, received, counts, None)
        on_host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        on_host.copy_(counts, non_blocking=True)
        wanted_N, ready = row_N[order_N], torch.cuda.Event()
        ready.record()
        return ExchangePlan(wanted_N, answer_N, received, on_host, ready)

    def gather(self, block: SampledBlock, plan: ExchangePlan, out_NF: Tensor) -> None:
        """See :class:`benchmarks.rgat.stores.feature_store.FeatureStore`."""
        if self._shard is None:
            raise ValueError("this store has been closed")
        self._await(plan)
        out_NB = as_bytes(out_NF, self.dtype, self.width)
        sent, received = plan.counts.tolist()
        asked, given, rows = self._rooms(self._shard, sum(received), sum(sent))
        dist.all_to_all_single(asked, plan.wanted[: sum(sent)], received, sent, group=self._group)
        self._gather(self._shard, asked, plan.received, (0, sum(received)), given)
        dist.all_to_all_single(rows.shards[0][: sum(sent)], given, sent, received, group=self._group)
        hops = block.shape.hops
        offsets = block.shape.node_offsets(hops)
        self._gather(rows, plan.answer, block.node_counts[hops], offsets, out_NB)

    def close(self) -> None:
        """See :class:`benchmarks.rgat.stores.feature_store.FeatureStore`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._shard = self._arrived = None
        self._given = self._given.new_empty(0)

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

    def _await(self, plan: ExchangePlan) -> None:
        if plan.ready is None:
            return
        plan.ready.synchronize()
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(plan.ready)
        for tensor in (plan.wanted, plan.answer, plan.received):
            tensor.record_stream(stream)

    def _rooms(self, shard: ShardedRows, received: int, sent: int) -> tuple[Tensor, Tensor, ShardedRows]:
        """Return reused buffers for row numbers from others, rows to send, and rows to receive."""
        if len(self._asked) <= received:
            self._given = self._given.new_empty(0)  # frees its memory before the next allocation
            self._asked = torch.empty(_with_reserve(received), dtype=torch.int32, device=self._device)
            self._given = torch.empty((len(self._asked), shard.row_bytes), dtype=torch.uint8, device=self._device)
        if self._arrived is None or len(self._arrived.shards[0]) <= sent:
            self._arrived = None
            arrived = torch.empty((_with_reserve(sent), shard.row_bytes), dtype=torch.uint8, device=self._device)
            types = len(self._partition.nodes)
            self._arrived = ShardedRows((arrived,), (LARGEST,) * types, (0,) * types, self._device)
        return self._asked[:received], self._given[:received], self._arrived


def _with_reserve(rows: int) -> int:
    """Return a buffer size for ``rows`` rows, with a margin so that slightly larger blocks need no new buffer."""
    return rows + rows // 8 + 1
