"""Edges of a prepared graph, checked while each rank reads its shard of targets into memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.rgat.graph import LARGEST, Graph, Schema
from benchmarks.rgat.prepared import indices_name, indptr_name
from benchmarks.rgat.sharded import (
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
from common.distributed.layout import Layout
from common.errors import DataError, UnsupportedImplementation
from common.ops.operation import AUTO

SMALL = 0.25
"""Maximum fraction of a GPU's free memory for a whole graph with ``auto``; the rest is for features."""

ALIGNMENT = 16


def open_graph(
    root: Path, schema: Schema, nodes: tuple[int, ...], placement: str, layout: Layout, ranks_per_node: int
) -> Graph:
    """Return the graph of a prepared folder. Collective.

    Args:
        nodes: number of nodes of each type.
        placement: ``local``: every rank reads all edges; ``peers``: the GPUs of each node share the graph, and each
            reads the edges into its range of targets; ``auto``: local if that takes little of a GPU's memory or peers
            is impossible, otherwise peers.
        layout, ranks_per_node: ranks that sample from the graph, and their number per node.

    Raises:
        DataError: a file is missing or damaged, has another dtype or shape, or refers to nodes that do not exist.
        ConfigError: the graph does not fit, or the placement is impossible.
        UnsupportedImplementation: ``peers`` was requested, and the GPUs cannot map each other's memory.
    """
    files = GraphFiles(root, schema, nodes)
    ranks = Ranks(layout.world_size, ranks_per_node, layout.device.type == "cuda")
    free, size = MemoryBytes.free(layout), graph_bytes(schema, nodes, files.edges)
    shared = ranks.gpus and ranks.on_node > 1 and size > SMALL * free.device
    order = (PEERS, LOCAL) if shared else (LOCAL,)

    def usable(order: Sequence[str]) -> tuple[str, ...]:
        return candidates("edges", placement, order, ranks, free, lambda shards: size / shards, node_copies=True)

    try:
        return first_supported("edges", usable(order), lambda name: files.graph(name, layout, ranks_per_node))
    except UnsupportedImplementation:
        if placement == AUTO:
            usable((LOCAL,))  # raises an error with the memory that every rank would need for all edges
        raise


def graph_bytes(schema: Schema, nodes: tuple[int, ...], edges: Sequence[int]) -> int:
    """Return the bytes of all shards together: int64 pointers and int32 sources.

    Args:
        nodes, edges: numbers by type and by relation.
    """
    return sum(8 * (nodes[target] + 1) for target in schema.targets) + 4 * sum(edges)


class GraphFiles:
    """The two files of every relation. Construction checks all headers.

    Attributes:
        edges: number of edges of each relation.

    Raises:
        DataError: a file is missing or damaged, or has another dtype or shape.
    """

    def __init__(self, root: Path, schema: Schema, nodes: tuple[int, ...]) -> None:
        self._root, self._schema, self._nodes = root, schema, nodes
        self.edges = tuple(self._count(number) for number in range(len(schema.relations)))

    def graph(self, placement: str, layout: Layout, ranks_per_node: int) -> Graph:
        """Return the graph in memory. Collective; see :func:`open_graph`.

        A shard has the ``indptr`` of all relations, then their ``indices``.
        """
        schema, device = self._schema, layout.device
        group = None if placement == LOCAL else layout.node(ranks_per_node)
        partition = NodePartition(self._nodes, 1 if group is None else group.size())
        rank = 0 if group is None else group.rank()
        cuts = [self._cuts(number, partition) for number in range(len(schema.relations))]
        targets = [partition.rows_per_shard[target] for target in schema.targets]
        edges = [[of[shard + 1] - of[shard] for of in cuts] for shard in range(partition.shards)]
        offsets = [_offsets(targets, of_shard) for of_shard in edges]
        memory = ShardedArray(placement, max(own[-1] for own in offsets), group, device)

        def views(first: int, dtype: torch.dtype, lengths: list[list[int]]) -> tuple[tuple[Tensor, ...], ...]:
            """Return the arrays of each relation in each shard: [R][S]."""
            return tuple(
                tuple(
                    memory.shards[shard][own[first + number] :][: dtype.itemsize * lengths[shard][number]].view(dtype)
                    for shard, own in enumerate(offsets)
                )
                for number in range(len(targets))
            )

        indptr = views(0, torch.int64, [[count + 1 for count in targets]] * partition.shards)
        indices = views(len(targets), torch.int32, edges)
        with RowLoader(device) as loader:
            for number, target in enumerate(schema.targets):
                first, last = partition.share(target, rank)
                self._read_indptr(number, first, last, indptr[number][rank], loader)
                self._read_indices(number, cuts[number][rank], cuts[number][rank + 1], indices[number][rank], loader)
        memory.share()
        return Graph(schema, self._nodes, indptr, indices, device, memory)

    def _count(self, number: int) -> int:
        """Return the number of edges of a relation."""
        with self._indptr(number), self._indices(number) as edges:
            return len(edges)

    def _indptr(self, number: int) -> DirectRows:
        relation, target = self._schema.relations[number], self._schema.targets[number]
        return DirectRows.from_npy(self._root / indptr_name(relation), torch.int64, (), self._nodes[target] + 1)

    def _indices(self, number: int) -> DirectRows:
        return DirectRows.from_npy(self._root / indices_name(self._schema.relations[number]), torch.int32, ())

    def _cuts(self, number: int, partition: NodePartition) -> tuple[int, ...]:
        """Return the first edge of every shard of a relation's targets, followed by the number of edges: [S + 1]."""
        path = self._root / indptr_name(self._schema.relations[number])
        target = self._schema.targets[number]
        first_targets = [partition.share(target, shard)[0] for shard in range(partition.shards)] + [self._nodes[target]]
        found = np.load(path, mmap_mode="r")[first_targets].tolist()  # a few numbers, each from another page
        if found[0] != 0 or found[-1] != self.edges[number] or sorted(found) != found:
            raise DataError(
                f"{path} goes from {found[0]:,} to {found[-1]:,} and not from 0 to the {self.edges[number]:,} edges of "
                f"{(self._root / indices_name(self._schema.relations[number])).name}, ascending; prepare it again"
            )
        return tuple(found)

    def _read_indptr(self, number: int, first: int, last: int, into: Tensor, loader: RowLoader) -> None:
        lowest = torch.zeros((), dtype=torch.int64, device=into.device)
        with self._indptr(number) as rows:
            for begin, end in loader.copy(rows, first, last + 1, into[: last + 1 - first]):
                steps = into[max(begin - 1, 0) : end].diff()
                if len(steps):
                    lowest = torch.minimum(lowest, steps.min())
        if int(lowest) < 0:
            path = self._root / indptr_name(self._schema.relations[number])
            raise DataError(f"{path} does not ascend among targets {first:,} to {last:,}; prepare it again")
        count = last - first
        into[count + 1 :] = into[count]  # entries beyond the type's last target have no edges
        into -= into[0].clone()

    def _read_indices(self, number: int, first: int, last: int, into: Tensor, loader: RowLoader) -> None:
        lowest = torch.zeros((), dtype=torch.int32, device=into.device)
        highest = torch.zeros_like(lowest)
        with self._indices(number) as rows:
            for begin, end in loader.copy(rows, first, last, into):
                low, high = into[begin:end].aminmax()
                lowest, highest = torch.minimum(lowest, low), torch.maximum(highest, high)
        source = self._schema.sources[number]
        wrong = int(lowest) if int(lowest) < 0 else int(highest)
        if not 0 <= wrong < min(self._nodes[source], LARGEST + 1):
            path = self._root / indices_name(self._schema.relations[number])
            raise DataError(
                f"{path} has an edge from node {wrong:,} of {self._schema.types[source]}, of which there are "
                f"{self._nodes[source]:,}; prepare it again"
            )


def _offsets(targets: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Return the byte offsets of all ``indptr``, then of all ``indices``, in a shard, then its size: [2 R + 1]."""
    sizes = [*(8 * (count + 1) for count in targets), *(4 * count for count in edges)]
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
