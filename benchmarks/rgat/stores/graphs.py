"""Builders of graphs in a device's memory, or sharded over the GPUs of a node, from prepared files or tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.rgat.graph import Graph, Schema
from benchmarks.rgat.stores.graph_files import GraphFiles
from benchmarks.rgat.stores.partition import Partition
from benchmarks.rgat.stores.placement import GB, LOCAL, PEERS, Room
from benchmarks.rgat.stores.row_loader import RowLoader
from common.distributed import one_machine
from common.distributed.layout import Layout
from common.distributed.symmetric_memory import PeerMemory, attempt
from common.errors import ConfigError, UnsupportedImplementation
from common.ops.operation import AUTO

PLACEMENTS = (LOCAL, PEERS)

SMALL = 0.25
"""Maximum fraction of a GPU's free memory for a whole graph with ``auto``; the rest is for features."""

ALIGNMENT = 16

Read = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Function that writes this rank's shard: ``indptr`` and ``indices`` of each relation."""


@dataclass(frozen=True)
class PeerGraph(Graph):
    """A graph sharded over the GPUs of a node.

    Attributes:
        memory: memory of the shards, which must live as long as the graph.
    """

    memory: PeerMemory


def open_graph(
    root: Path,
    schema: Schema,
    nodes: tuple[int, ...],
    placement: str,
    layout: Layout,
    ranks_per_node: int,
    device: torch.device,
) -> Graph:
    """Return the graph of a prepared folder. Collective.

    Args:
        nodes: number of nodes of each type.
        placement: ``local``: every rank reads all edges; ``peers``: the GPUs of each node share the graph, and each
            reads the edges into its range of targets; ``auto``: local if that takes little of a GPU's memory or peers
            is impossible, otherwise peers.
        layout, ranks_per_node: ranks that sample from the graph, and their number per node.
        device: device of this rank.

    Raises:
        DataError: a file is missing or damaged, has another dtype or shape, or refers to nodes that do not exist.
        ConfigError: the graph does not fit, or the placement is unknown or impossible.
        UnsupportedImplementation: ``peers`` was requested, and the GPUs cannot map each other's memory.
    """
    if placement not in (AUTO, *PLACEMENTS):
        raise ConfigError(
            f"unknown placement of the graph {placement!r}; choose one of {', '.join((AUTO, *PLACEMENTS))}"
        )
    files = GraphFiles(root, schema, nodes)
    group = layout.node(ranks_per_node)
    chosen = _choose(placement, graph_bytes(schema, nodes, files.edges), layout, ranks_per_node, device)
    with RowLoader(device) as loader:
        if chosen == PEERS and group is not None:
            partition, shard = Partition(nodes, group.size()), group.rank()
            edges = [cuts[shard + 1] - cuts[shard] for cuts in files.shard_edges(partition)]
            graph, reason = _peer_graph(
                schema, partition, edges, layout, ranks_per_node, device,
                lambda indptr, indices: files.read(partition, shard, indptr, indices, loader),
            )  # fmt: skip
            if graph is not None:
                return graph
            if placement == PEERS:
                raise UnsupportedImplementation(f"the graph cannot be placed as {PEERS!r}: {reason}")
            _choose(LOCAL, graph_bytes(schema, nodes, files.edges), layout, ranks_per_node, device)
        whole = Partition(nodes, 1)
        indptr = [torch.empty(nodes[target] + 1, dtype=torch.int64, device=device) for target in schema.targets]
        indices = [torch.empty(edges, dtype=torch.int32, device=device) for edges in files.edges]
        files.read(whole, 0, indptr, indices, loader)
    return graph_in_memory(schema, nodes, indptr, indices)


def graph_in_memory(
    schema: Schema, nodes: tuple[int, ...], indptr: Sequence[Tensor], indices: Sequence[Tensor], shards: int = 1
) -> Graph:
    """Return a graph of tensors on one device. With one shard, the tensors are not copied.

    Args:
        schema, nodes: see :class:`benchmarks.rgat.graph.Graph`.
        indptr: [R], int64, [targets + 1].
        indices: [R], int32, [edges].
        shards: number of shards, to emulate several GPUs.
    """
    partition = Partition(nodes, shards)
    cut = [
        [_cut(indptr[number], indices[number], *partition.share(target, shard), partition.rows_per_shard[target])
         for shard in range(shards)]
        for number, target in enumerate(schema.targets)
    ]  # fmt: skip
    return Graph(
        schema,
        nodes,
        tuple(tuple(part for part, _ in of_relation) for of_relation in cut),
        tuple(tuple(part for _, part in of_relation) for of_relation in cut),
        indices[0].device,
    )


def share_graph(
    schema: Schema,
    nodes: tuple[int, ...],
    indptr: Sequence[Tensor],
    indices: Sequence[Tensor],
    layout: Layout,
    ranks_per_node: int,
    device: torch.device,
) -> Graph:
    """Return the graph whose shards the GPUs of a node have built; each is copied to shared memory. Collective.

    Args:
        schema, nodes: schema and node counts of the whole graph.
        indptr: [R], int64, [rows_per_shard + 1] of ``Partition(nodes, ranks of the node)``: this rank's, from 0.
        indices: [R], int32: this rank's.
        layout, ranks_per_node, device: see :func:`open_graph`.

    Raises:
        UnsupportedImplementation: the GPUs cannot map each other's memory.
    """
    group = layout.node(ranks_per_node)
    if group is None:
        return graph_in_memory(schema, nodes, indptr, indices)

    def copy(own_indptr: Sequence[Tensor], own_indices: Sequence[Tensor]) -> None:
        for into, values in zip((*own_indptr, *own_indices), (*indptr, *indices), strict=True):
            into.copy_(values)

    partition, edges = Partition(nodes, group.size()), [len(values) for values in indices]
    graph, reason = _peer_graph(schema, partition, edges, layout, ranks_per_node, device, copy)
    if graph is None:
        raise UnsupportedImplementation(f"the graph cannot be placed as {PEERS!r}: {reason}")
    return graph


def graph_bytes(schema: Schema, nodes: tuple[int, ...], edges: Sequence[int]) -> int:
    """Return the bytes of the edges of all shards together: int64 pointers and int32 sources.

    Args:
        nodes: number of nodes of each type.
        edges: number of edges of each relation.
    """
    return sum(8 * (nodes[target] + 1) for target in schema.targets) + 4 * sum(edges)


def _cut(indptr: Tensor, indices: Tensor, first: int, last: int, per_shard: int) -> tuple[Tensor, Tensor]:
    """Return the tensors of one shard."""
    if last - first == len(indptr) - 1 == per_shard:
        return indptr, indices
    begin, end = int(indptr[first]), int(indptr[last])
    own = indptr.new_full((per_shard + 1,), end - begin)
    own[: last + 1 - first] = indptr[first : last + 1] - begin
    return own, indices[begin:end].clone()


def _choose(placement: str, size: int, layout: Layout, ranks_per_node: int, device: torch.device) -> str:
    room, on_node = Room.measured(layout, device), min(layout.world_size, ranks_per_node)
    gpus = device.type == "cuda"
    free = room.device if gpus else room.host / on_node
    if placement == PEERS and not gpus:
        raise ConfigError("the graph cannot be placed as 'peers': it needs GPUs; choose 'local'")
    if placement == PEERS and on_node == 1:
        raise ConfigError("the graph cannot be placed as 'peers': it needs two ranks or more; choose 'local'")
    if placement == AUTO:
        placement = PEERS if gpus and on_node > 1 and size > SMALL * free else LOCAL
    needed = size / on_node if placement == PEERS else size
    if needed > free:
        remedy = (
            f"choose {PEERS!r}, which takes {size / on_node / GB:.1f} GB"
            if gpus and placement == LOCAL and on_node > 1 and size / on_node <= free
            else "use more GPUs or a smaller graph"
        )
        raise ConfigError(
            f"a graph of {size / GB:.1f} GB as {placement!r} needs {needed / GB:.1f} GB of each rank's memory, and "
            f"{free / GB:.1f} GB are free; {remedy}"
        )
    return placement


def _peer_graph(
    schema: Schema,
    partition: Partition,
    edges: Sequence[int],
    layout: Layout,
    ranks_per_node: int,
    device: torch.device,
    read: Read,
) -> tuple[PeerGraph | None, str]:
    """Return the graph sharded over a node, or the reason why it is impossible, which is the same on all ranks.

    Args:
        edges: edges of each relation in this rank's shard.
    """
    group = layout.node(ranks_per_node)
    assert group is not None  # the caller has checked for several ranks
    targets = [partition.rows_per_shard[target] for target in schema.targets]
    edges_of = list(zip(*(one_machine.gathered(count, group, device) for count in edges), strict=True))
    places = [_places(targets, of_rank) for of_rank in edges_of]
    size = max(own[-1] for own in places)
    memory, reason = attempt(lambda: PeerMemory.allocate(size, group, device), group, device)
    if memory is None:
        return None, reason
    relations = range(len(targets))
    indptr = tuple(
        tuple(memory.tensor(rank, (targets[number] + 1,), torch.int64, own[number]) for rank, own in enumerate(places))
        for number in relations
    )
    indices = tuple(
        tuple(
            memory.tensor(rank, (edges_of[rank][number],), torch.int32, own[len(targets) + number])
            for rank, own in enumerate(places)
        )
        for number in relations
    )
    read([shards[memory.rank] for shards in indptr], [shards[memory.rank] for shards in indices])
    one_machine.gathered(0, group, device)  # all ranks have written their shards
    return PeerGraph(schema, partition.nodes, indptr, indices, device, memory), ""


def _places(targets: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Return the byte offsets of all ``indptr``, then of all ``indices``, in a shard, then its size: [2 R + 1]."""
    sizes = [*(8 * (count + 1) for count in targets), *(4 * count for count in edges)]
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
