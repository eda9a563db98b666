"""A small graph in prepared files, blocks of its nodes, and what the ranks of the tests of stores do with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.feature_store import E4M3, FeatureStore, Fill, open_features
from benchmarks.rgat.graph import BlockShape, SampledBlock, Schema
from benchmarks.rgat.graph_store import open_graph
from benchmarks.rgat.prepared import features_name, indices_name, indptr_name
from benchmarks.rgat.sharded import HOST, NodePartition, Ranks, ShardedArray
from common.distributed import symmetric_memory
from common.distributed.layout import Layout
from common.distributed.symmetric_memory import PeerMemory
from tests.gloo_ranks import on_ranks

SCHEMA = Schema.augmented(("paper", "author", "fos", "lonely"), ("paper__cites__paper", "paper__by__author"), "paper")
NODES = (50, 31, 2, 1)
EDGES = (130, 40, 40)
WIDTH = 24
UNTOUCHED = 7
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Made:
    """A graph in memory, as its files have it: indptr and indices of each relation, rows of each type."""

    features: list[Tensor]
    indptr: list[Tensor]
    indices: list[Tensor]


def made() -> Made:
    """Always the same; rows of any bits, no NaN among them so that they can be compared."""
    random = torch.Generator().manual_seed(5)
    features = [(4 * torch.randn((count, WIDTH), generator=random)).to(E4M3) for count in NODES]
    indptr, indices = [], []
    for source, target, edges in zip(SCHEMA.sources, SCHEMA.targets, EDGES, strict=True):
        cuts = torch.randint(edges + 1, (NODES[target] - 1,), generator=random).sort().values
        indptr.append(torch.cat([torch.zeros(1), cuts, torch.full((1,), edges)]).long())
        indices.append(torch.randint(NODES[source], (edges,), generator=random).int())
    return Made(features, indptr, indices)


def write(root: Path, graph: Made) -> None:
    """The prepared files."""
    for name, rows in zip(SCHEMA.types, graph.features, strict=True):
        path = root / features_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rows.view(torch.uint8).numpy())
    for relation, indptr, indices in zip(SCHEMA.relations, graph.indptr, graph.indices, strict=True):
        path = root / indptr_name(relation)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, indptr.numpy())
        np.save(root / indices_name(relation), indices.numpy())


def block(seed: int, device: torch.device, counts: tuple[int, ...] = (17, 12, 2, 0)) -> SampledBlock:
    """Some nodes of each type, drawn anyhow, with unused capacity; only the parts that a store reads."""
    shape = BlockShape(SCHEMA, ((4, 0, 0, 0), (25, 15, 3, 1)), ((9, 9, 9),), ((9, 9, 9),))
    random = torch.Generator().manual_seed(seed)
    drawn = SampledBlock.empty(shape, CPU)
    drawn.nodes.fill_(1 << 30)
    drawn.node_counts[1] = torch.tensor(counts, dtype=torch.int32)
    for first, count, nodes in zip(shape.node_offsets(1), counts, NODES, strict=False):
        drawn.nodes[first : first + count] = torch.randint(nodes, (count,), generator=random, dtype=torch.int32)
    return SampledBlock.of(shape, {name: tensor.to(device) for name, tensor in drawn.tensors().items()})


def empty_rows(drawn: SampledBlock) -> Tensor:
    """Room for the rows, filled with something else."""
    places = drawn.shape.node_offsets(1)[-1]
    return torch.full((places, WIDTH), UNTOUCHED, dtype=torch.uint8, device=drawn.nodes.device).view(E4M3)


def expected(graph: Made, drawn: SampledBlock) -> Tensor:
    """The rows' bytes, copied one by one."""
    out = empty_rows(drawn).cpu().view(torch.uint8)
    counts, nodes = drawn.node_counts[1].tolist(), drawn.nodes.tolist()
    for rows, first, count in zip(graph.features, drawn.shape.node_offsets(1), counts, strict=False):
        for place in range(first, first + count):
            out[place] = rows[nodes[place]].view(torch.uint8)
    return out


BLOCKS = 6
PLACED = {"auto": "peers", "auto over nodes": "exchange", "peers": "peers", "host": "host", "exchange": "exchange"}
"""Requested placement, and the name of the store."""


class HostHandle:
    """Memory of the host in the place of what GPUs map from each other."""

    def __init__(self, memory: ShardedArray) -> None:
        self._memory = memory

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int) -> Tensor:
        start = storage_offset * dtype.itemsize
        return self._memory.shards[rank][start : start + sizes.numel() * dtype.itemsize].view(dtype).view(sizes)


def use_host_for_peers() -> None:
    """Let processes without GPUs have peers' memory: only where it lies is another."""

    def allocate(size: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
        memory = ShardedArray(HOST, size, group, device)
        return PeerMemory(memory.own, HostHandle(memory), group.rank(), group.size())  # type: ignore[arg-type]

    PeerMemory.allocate = allocate  # type: ignore[method-assign]
    symmetric_memory.refusal = lambda group, device: None
    Ranks.refusal = lambda *_: None  # type: ignore[method-assign]


def run_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Gather blocks through every placement, and return what was wrong; and the graph, as this rank sees it."""
    use_host_for_peers()
    layout = Layout({"dp": world}, rank)
    return {"features": gathered(layout, Path(folder)), "graph": seen(layout, Path(folder))}


def ranks_found(world: int, folder: Path) -> list[dict[str, Any]]:
    """Run ranks on the small graph, with files under ``folder``; return the results of each."""
    write(folder, made())
    return on_ranks(run_rank, world, folder)


def gathered(layout: Layout, folder: Path) -> dict[str, tuple[str, int]]:
    """Return the placement in use and the number of wrong bytes, for each requested placement."""
    found, graph = {}, made()
    for requested in PLACED:
        placement, _, over_nodes = requested.partition(" ")
        ranks_per_node = 1 if over_nodes else layout.world_size
        store = open_features(folder, SCHEMA, NODES, WIDTH, placement, layout, ranks_per_node)
        found[requested] = (store.name, wrong_bytes(store, graph, layout.rank, layout.device))
        store.close()
    return found


def seen(layout: Layout, folder: Path) -> list[tuple[tuple[Tensor, ...], ...]]:
    """The graph read into shards: indptr and indices."""
    graph = open_graph(folder, SCHEMA, NODES, "peers", layout, layout.world_size)
    return [copied(graph.indptr), copied(graph.indices)]


def from_tables(graph: Made) -> Fill:
    """A function that fills shards from the rows of all nodes of each type."""

    def fill(partition: NodePartition, shard: int, own_RF: Tensor) -> None:
        for number, (table_NF, begin) in enumerate(zip(graph.features, partition.first_rows, strict=True)):
            first, last = partition.share(number, shard)
            own_RF[begin : begin + last - first].view(torch.uint8).copy_(table_NF[first:last].view(torch.uint8))

    return fill


def assert_rows(store: FeatureStore, graph: Made, device: torch.device = CPU) -> None:
    """Blocks with many rows, none, and a full one."""
    for seed, counts in enumerate([(17, 12, 2, 0), (0, 0, 0, 0), (25, 15, 3, 1)]):
        one = block(seed, device, counts)
        out = empty_rows(one)
        if seed and device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        store.gather(one, store.plan(one), out)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out.view(torch.uint8).cpu(), expected(graph, one))


def copied(shards: tuple[tuple[Tensor, ...], ...]) -> tuple[tuple[Tensor, ...], ...]:
    """Tensors of their own on the host, which can be saved."""
    return tuple(tuple(shard.to("cpu", copy=True) for shard in of_relation) for of_relation in shards)


def wrong_bytes(store: FeatureStore, graph: Made, rank: int, device: torch.device = CPU) -> int:
    """Return the number of wrong bytes in all blocks."""
    counts = [(17, 12, 2, 0), (25, 15, 3, 1), (0, 0, 0, 0), (1, 0, 3, 1)]
    # Nobody asks for anything at first; later one rank asks for nothing where others ask for much.
    fills = [(0, 0, 0, 0), *(counts[(step + rank) % 4] for step in range(BLOCKS - 1))]
    blocks = [block(10 * rank + step, device, filled) for step, filled in enumerate(fills)]
    plans, wrong = [store.plan(one) for one in blocks[:2]], 0
    for step, one in enumerate(blocks):
        out = empty_rows(one)
        store.gather(one, plans.pop(0), out)
        if step + 2 < BLOCKS:
            plans.append(store.plan(blocks[step + 2]))
        wrong += int((out.view(torch.uint8).cpu() != expected(graph, one)).sum())
    return wrong
