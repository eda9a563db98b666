"""A small graph in prepared files, blocks of its nodes, and what the ranks of the tests of stores do with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, SampledBlock, Schema
from benchmarks.rgat.prepared_names import features_name, indices_name, indptr_name
from benchmarks.rgat.stores import graphs
from benchmarks.rgat.stores.feature_store import FeatureStore
from benchmarks.rgat.stores.features import open_features
from benchmarks.rgat.stores.host_memory import NodeMemory
from benchmarks.rgat.stores.placement import Ranks
from common.distributed import one_machine
from common.distributed.layout import Layout
from common.distributed.symmetric_memory import PeerMemory

SCHEMA = Schema.augmented(("paper", "author", "fos", "lonely"), ("paper__cites__paper", "paper__by__author"), "paper")
NODES = (50, 31, 2, 1)
EDGES = (130, 40, 40)
WIDTH = 24
UNTOUCHED = 7
CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
DTYPES = (E4M3, torch.float16)


@dataclass(frozen=True)
class Made:
    """A graph in memory, as its files have it: indptr and indices of each relation, rows of each type."""

    features: list[Tensor]
    indptr: list[Tensor]
    indices: list[Tensor]


def made(dtype: torch.dtype = E4M3) -> Made:
    """Always the same; rows of any bits, no NaN among them so that they can be compared."""
    random = torch.Generator().manual_seed(5)
    features = [(4 * torch.randn((count, WIDTH), generator=random)).to(dtype) for count in NODES]
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
        np.save(path, (rows.view(torch.uint8) if rows.dtype == E4M3 else rows).numpy())
    for relation, indptr, indices in zip(SCHEMA.relations, graph.indptr, graph.indices, strict=True):
        path = root / indptr_name(relation)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, indptr.numpy())
        np.save(root / indices_name(relation), indices.numpy())


def block(seed: int, device: torch.device, counts: tuple[int, ...] = (17, 12, 2, 0)) -> SampledBlock:
    """Some nodes of each type, drawn anyhow, in room for more; only what a store looks at."""
    shape = BlockShape(SCHEMA, ((4, 0, 0, 0), (25, 15, 3, 1)), ((9, 9, 9),), ((9, 9, 9),))
    random = torch.Generator().manual_seed(seed)
    drawn = SampledBlock.empty(shape, CPU)
    drawn.nodes.fill_(1 << 30)
    drawn.node_counts[1] = torch.tensor(counts, dtype=torch.int32)
    for first, count, nodes in zip(shape.node_offsets(1), counts, NODES, strict=False):
        drawn.nodes[first : first + count] = torch.randint(nodes, (count,), generator=random, dtype=torch.int32)
    return SampledBlock.of(shape, {name: tensor.to(device) for name, tensor in drawn.tensors().items()})


def room(drawn: SampledBlock, dtype: torch.dtype) -> Tensor:
    """Room for the rows, filled with something else."""
    places = drawn.shape.node_offsets(1)[-1]
    bytes_ = torch.full((places, WIDTH * dtype.itemsize), UNTOUCHED, dtype=torch.uint8, device=drawn.nodes.device)
    return bytes_.view(dtype)


def expected(graph: Made, drawn: SampledBlock) -> Tensor:
    """The rows' bytes, copied one by one."""
    out = room(drawn, graph.features[0].dtype).cpu().view(torch.uint8)
    counts, nodes = drawn.node_counts[1].tolist(), drawn.nodes.tolist()
    for rows, first, count in zip(graph.features, drawn.shape.node_offsets(1), counts, strict=False):
        for place in range(first, first + count):
            out[place] = rows[nodes[place]].view(torch.uint8)
    return out


BLOCKS = 6
PLACED = {"auto": "peers", "auto over nodes": "exchange", "peers": "peers", "host": "host", "exchange": "exchange"}
"""What is asked for, and the name of what comes."""


class HostHandle:
    """Memory of the host in the place of what GPUs map from each other."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype, storage_offset: int) -> Tensor:
        start = storage_offset * dtype.itemsize
        return self._memory.buffers[rank][start : start + sizes.numel() * dtype.itemsize].view(dtype).view(sizes)


def use_host_for_peers() -> None:
    """Let processes without GPUs have peers' memory: only where it lies is another."""

    def allocate(size: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
        memory = NodeMemory(size, group, device)
        return PeerMemory(memory.own, HostHandle(memory), group.rank(), group.size())  # type: ignore[arg-type]

    PeerMemory.allocate = allocate  # type: ignore[assignment,method-assign]
    one_machine.refusal = lambda group, device: None
    Ranks.refusal = lambda ranks, placement: None  # type: ignore[method-assign]
    graphs._choose = lambda *_: "peers"


def run_rank(rank: int, world: int, folder: str) -> None:
    """Gather blocks through every placement, and save what was wrong; and the graph, as this rank sees it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    use_host_for_peers()
    layout = Layout({"dp": world}, rank)
    found = {"features": gathered(layout, Path(folder)), "graphs": seen(layout, Path(folder) / str(E4M3))}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def ranks_found(world: int, folder: Path) -> list[dict[str, Any]]:
    """What each of so many ranks saves of the small graph, whose files are written below ``folder``."""
    for dtype in DTYPES:
        write(folder / str(dtype), made(dtype))
    mp.start_processes(run_rank, args=(world, str(folder)), nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def gathered(layout: Layout, folder: Path) -> dict[str, tuple[str, int, int]]:
    """By what is asked for: the name of what comes, blocks that were gathered, bytes that were wrong."""
    found = {}
    for asked in PLACED:
        wrong = blocks = 0
        for dtype in DTYPES:
            store, graph = opened(asked, folder / str(dtype), dtype, layout), made(dtype)
            wrong += wrong_bytes(store, graph, layout.rank, layout.device)
            blocks += BLOCKS
            found[asked] = (store.name, blocks, wrong)
            store.close()
    return found


def seen(layout: Layout, folder: Path) -> list[list[tuple[tuple[Tensor, ...], ...]]]:
    """The graph read into shards, and shards of tensors put together: indptr and indices of both."""
    world, rank = layout.world_size, layout.rank
    read = graphs.open_graph(folder, SCHEMA, NODES, "peers", layout, world, CPU)
    graph = made()
    cut = graphs.graph_in_memory(SCHEMA, NODES, graph.indptr, graph.indices, world)
    own_indptr, own_indices = ([shards[rank] for shards in of] for of in (cut.indptr, cut.indices))
    shared = graphs.share_graph(SCHEMA, NODES, own_indptr, own_indices, layout, world, CPU)
    return [[copied(graph.indptr), copied(graph.indices)] for graph in (read, shared)]


def copied(shards: tuple[tuple[Tensor, ...], ...]) -> tuple[tuple[Tensor, ...], ...]:
    """Tensors of their own on the host, which can be saved."""
    return tuple(tuple(shard.to("cpu", copy=True) for shard in of_relation) for of_relation in shards)


def opened(asked: str, root: Path, dtype: torch.dtype, layout: Layout) -> FeatureStore:
    placement, _, over_nodes = asked.partition(" ")
    ranks_per_node = 1 if over_nodes else layout.world_size
    return open_features(root, SCHEMA, NODES, WIDTH, dtype, placement, layout, ranks_per_node, layout.device)


def wrong_bytes(store: FeatureStore, graph: Made, rank: int, device: torch.device = CPU) -> int:
    """Bytes of all blocks that are not what they should be."""
    counts = [(17, 12, 2, 0), (25, 15, 3, 1), (0, 0, 0, 0), (1, 0, 3, 1)]
    # Nobody asks for anything at first; later one rank asks for nothing where others ask for much.
    asked = [(0, 0, 0, 0), *(counts[(step + rank) % 4] for step in range(BLOCKS - 1))]
    blocks = [block(10 * rank + step, device, filled) for step, filled in enumerate(asked)]
    plans, wrong = [store.plan(one) for one in blocks[:2]], 0
    for step, one in enumerate(blocks):
        out = room(one, store.dtype)
        store.gather(one, plans.pop(0), out)
        if step + 2 < BLOCKS:
            plans.append(store.plan(blocks[step + 2]))
        wrong += int((out.view(torch.uint8).cpu() != expected(graph, one)).sum())
    return wrong
