"""A small graph in prepared files, blocks of its nodes, and what the ranks of the tests of stores do with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.schema import Schema
from benchmarks.rgat.stores.features import open_features
from benchmarks.rgat.stores.files import feature_file, indices_file, indptr_file
from common.distributed.layout import Layout

SCHEMA = Schema.augmented(("paper", "author", "fos", "lonely"), ("paper__cites__paper", "paper__by__author"), "paper")
NODES = (50, 31, 2, 1)
EDGES = (130, 40, 40)
WIDTH = 24
UNTOUCHED = 7
E4M3 = torch.float8_e4m3fn


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
        path = feature_file(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, (rows.view(torch.uint8) if rows.dtype == E4M3 else rows).numpy())
    for relation, indptr, indices in zip(SCHEMA.relations, graph.indptr, graph.indices, strict=True):
        path = indptr_file(root, relation)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, indptr.numpy())
        np.save(indices_file(root, relation), indices.numpy())


def block(seed: int, device: torch.device, counts: tuple[int, ...] = (17, 12, 2, 0)) -> Block:
    """Some nodes of each type, drawn anyhow, in room for more; only what a store looks at."""
    shape = BlockShape(SCHEMA, ((4, 0, 0, 0), (25, 15, 3, 1)), ((9, 9, 9),), ((9, 9, 9),))
    random = torch.Generator().manual_seed(seed)
    drawn = Block.empty(shape, torch.device("cpu"))
    drawn.nodes.fill_(1 << 30)
    drawn.node_counts[1] = torch.tensor(counts, dtype=torch.int32)
    for first, count, nodes in zip(shape.node_offsets(1), counts, NODES, strict=False):
        drawn.nodes[first : first + count] = torch.randint(nodes, (count,), generator=random, dtype=torch.int32)
    return Block.of(shape, {name: tensor.to(device) for name, tensor in drawn.tensors().items()})


def room(drawn: Block, dtype: torch.dtype) -> Tensor:
    """Room for the rows, filled with something else."""
    places = drawn.shape.node_offsets(1)[-1]
    bytes_ = torch.full((places, WIDTH * dtype.itemsize), UNTOUCHED, dtype=torch.uint8, device=drawn.nodes.device)
    return bytes_.view(dtype)


def expected(graph: Made, drawn: Block) -> Tensor:
    """The rows' bytes, copied one by one."""
    out = room(drawn, graph.features[0].dtype).cpu().view(torch.uint8)
    counts, nodes = drawn.node_counts[1].tolist(), drawn.nodes.tolist()
    for rows, first, count in zip(graph.features, drawn.shape.node_offsets(1), counts, strict=False):
        for place in range(first, first + count):
            out[place] = rows[nodes[place]].view(torch.uint8)
    return out


def run_rank(rank: int, world: int, folder: str, placements: tuple[str, ...]) -> None:
    """Gather blocks of this rank's own through every placement, planned two ahead, and save what was wrong."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    layout, device = Layout({"dp": world}, rank), torch.device("cpu")
    found: dict[str, Any] = {}
    for dtype in (E4M3, torch.float16):
        root, graph = Path(folder) / str(dtype), made(dtype)
        for placement in placements:
            store = open_features(root, SCHEMA, NODES, WIDTH, dtype, placement, layout, world, device)
            counts = [(17, 12, 2, 0), (25, 15, 3, 1), (0, 0, 0, 0), (1, 0, 3, 1)]
            # One rank asks for nothing where others ask for much.
            blocks = [block(10 * rank + step, device, counts[(step + rank) % 4]) for step in range(5)]
            plans = [store.plan(one) for one in blocks[:2]]
            for step, one in enumerate(blocks):
                out = room(one, dtype)
                store.gather(one, plans.pop(0), out)
                if step + 2 < len(blocks):
                    plans.append(store.plan(blocks[step + 2]))
                wrong = int((out.view(torch.uint8) != expected(graph, one)).sum())
                found[f"{placement} {dtype} {step}"] = (store.name, wrong)
            store.close()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
