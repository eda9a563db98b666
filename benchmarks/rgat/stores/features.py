"""Builders of feature stores, from prepared files or from a function that fills shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.rgat.graph import Schema
from benchmarks.rgat.prepared_names import features_name
from benchmarks.rgat.stores.exchange import ExchangedFeatures
from benchmarks.rgat.stores.feature_store import FeatureStore, InPlaceFeatures
from benchmarks.rgat.stores.host_memory import NodeMemory
from benchmarks.rgat.stores.partition import Partition
from benchmarks.rgat.stores.placement import EXCHANGE, HOST, LOCAL, PEERS, Ranks, Room, candidates
from benchmarks.rgat.stores.row_loader import RowLoader
from common.data.direct_rows import DirectRows
from common.distributed import groups, one_machine
from common.distributed.layout import Layout
from common.distributed.symmetric_memory import PeerMemory, attempt
from common.errors import ConfigError, UnsupportedImplementation

DTYPES = (torch.float8_e4m3fn, torch.float16, torch.float32)

Fill = Callable[[Partition, int, Tensor], None]
"""Function that writes a shard: (partition, index of the shard, its rows [partition.rows, F])."""


def open_features(
    root: Path,
    schema: Schema,
    nodes: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    placement: str,
    layout: Layout,
    ranks_per_node: int,
    device: torch.device,
) -> FeatureStore:
    """Return the features of a prepared folder. Collective.

    Args:
        width: number of features of a node.
        dtype: dtype of the features: e4m3, fp16 or fp32.
        placement: see :func:`build_features`. Each rank reads only its shard; with ``local`` every rank reads all
            rows.
        layout, ranks_per_node, device: see :func:`build_features`.

    Raises:
        DataError: a file is missing or damaged, or has another dtype or shape.
        ConfigError: the features do not fit in the requested placement, or in any.
        UnsupportedImplementation: the requested placement needs mapped memory of other GPUs, which is unavailable.
    """

    def fill(partition: Partition, shard: int, own_RF: Tensor) -> None:
        with RowLoader(device) as loader:
            for number, (name, begin) in enumerate(zip(schema.types, partition.first_rows, strict=True)):
                first, last = partition.share(number, shard)
                with DirectRows.from_npy(root / features_name(name), dtype, (width,), nodes[number]) as rows:
                    for _ in loader.copy(rows, first, last, own_RF[begin : begin + last - first]):
                        pass

    return build_features(nodes, width, dtype, placement, layout, ranks_per_node, device, fill)


def build_features(
    nodes: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    placement: str,
    layout: Layout,
    ranks_per_node: int,
    device: torch.device,
    fill: Fill,
) -> FeatureStore:
    """Return a feature store whose shards ``fill`` writes. Collective.

    Args:
        nodes: number of nodes of each type.
        width, dtype: number of features of a row, and their dtype.
        placement: ``local``: every device has all rows; ``peers``: the GPUs of one node have a shard each, which all
            read in place; ``host``: the same in pinned host memory; ``exchange``: every rank has a shard and sends
            rows on request. ``auto``: a single rank uses local, or host if that does not fit. Ranks of one node use
            the first of peers, exchange and host that fits in free memory; peers also requires that GPUs can map each
            other's memory. Several nodes use exchange. Except with local, each row is read by one rank.
        layout: ranks that hold the features.
        ranks_per_node: number of these ranks on each node.
        device: device of this rank.
        fill: called once, with this rank's shard.

    Raises:
        ConfigError: the features do not fit in the requested placement, or in any.
        UnsupportedImplementation: the requested placement needs mapped memory of other GPUs, which is unavailable.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"features are one of {', '.join(str(known) for known in DTYPES)}, not {dtype}")
    ranks = Ranks(layout.world_size, ranks_per_node, device.type == "cuda")
    names = candidates(placement, ranks, nodes, width * dtype.itemsize, Room.measured(layout, device))
    reason = ""
    for name in names:
        partition = Partition(nodes, 1 if name == LOCAL else layout.world_size)
        own = _Own(partition, layout.rank % partition.shards, width, dtype, fill)
        if name == PEERS:
            store, reason = _peers(own, layout, ranks_per_node, device)
            if store is not None:
                return store
        elif name == HOST:
            return _host(own, layout, ranks_per_node, device)
        elif name == EXCHANGE:
            # A separate communicator, so that concurrent traffic of training does not wait for it.
            group = groups.make(range(layout.world_size))
            rows = own.filled(torch.empty(own.bytes, dtype=torch.uint8, device=device))
            return ExchangedFeatures(partition, rows, dtype, width, group)
        else:
            rows = own.filled(torch.empty(own.bytes, dtype=torch.uint8, device=device))
            return InPlaceFeatures(LOCAL, partition, (rows,), dtype, width, device)
    raise UnsupportedImplementation(f"features cannot be placed as {PEERS!r}: {reason}")


@dataclass(frozen=True)
class _Own:
    """Description of this rank's shard, independent of its memory."""

    partition: Partition
    shard: int
    width: int
    dtype: torch.dtype
    fill: Fill

    @property
    def bytes(self) -> int:
        return self.partition.rows * self.width * self.dtype.itemsize

    def rows(self, memory: Tensor) -> Tensor:
        """Return a shard's memory as rows of bytes."""
        return memory.view(self.partition.rows, -1)

    def filled(self, memory: Tensor) -> Tensor:
        """Fill a shard's memory, and return it as rows of bytes."""
        rows = self.rows(memory)
        self.fill(self.partition, self.shard, rows.view(self.dtype))
        return rows


def _peers(own: _Own, layout: Layout, ranks_per_node: int, device: torch.device) -> tuple[FeatureStore | None, str]:
    group = layout.node(ranks_per_node)
    assert group is not None  # one rank has no peers
    memory, reason = attempt(lambda: PeerMemory.allocate(own.bytes, group, device), group, device)
    if memory is None:
        return None, reason
    shards = memory.tensors((own.bytes,), torch.uint8)
    own.filled(shards[memory.rank])
    one_machine.gathered(0, group, device)  # all ranks have filled their shards
    rows = tuple(own.rows(shard) for shard in shards)
    return (
        InPlaceFeatures(PEERS, own.partition, rows, own.dtype, own.width, device, memory.close),
        "",
    )


def _host(own: _Own, layout: Layout, ranks_per_node: int, device: torch.device) -> FeatureStore:
    memory = NodeMemory(own.bytes, layout.node(ranks_per_node), device)
    own.filled(memory.own)
    memory.share()
    rows = tuple(own.rows(shard) for shard in memory.buffers)
    return InPlaceFeatures(HOST, own.partition, rows, own.dtype, own.width, device, memory.close)


def from_tables(tables: Sequence[Tensor]) -> Fill:
    """Return a function that fills shards from the rows of all nodes of each type, [nodes, F]."""

    def fill(partition: Partition, shard: int, own_RF: Tensor) -> None:
        for number, (table_NF, begin) in enumerate(zip(tables, partition.first_rows, strict=True)):
            first, last = partition.share(number, shard)
            own_RF[begin : begin + last - first].view(torch.uint8).copy_(table_NF[first:last].view(torch.uint8))

    return fill
