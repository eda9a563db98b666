"""Sampling around the seeds of a micro-batch, in a made-up eighth of IGBH-Full: what one of eight GPUs has."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from benchmarks.rgat.capacities import enough_shape, largest_shape, moments
from benchmarks.rgat.graph import Graph
from benchmarks.rgat.made_up_graph import made_up_igbh
from benchmarks.rgat.ops import sample
from benchmarks.rgat.ops.sample.sampler import Sampler
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

FANOUTS = (15, 10, 5)
SEEDS = 2048
ESTIMATED, SIGMA = 20, 5.0
"""Batches that room is estimated from, and deviations above their mean."""

SECTOR = 32
"""Bytes that a GPU reads or writes at least."""


@functools.cache
def _graph() -> Graph:
    return made_up_igbh(8, 0, torch.device(cases.DEVICE))


def case(function: Callable[..., Sampler], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Two accesses at random of an edge, to its source and to that one's stamp, and one of a node, to put that back."""
    graph = _graph()
    largest = largest_shape(graph, batch, FANOUTS)

    def seeds() -> torch.Tensor:
        papers = torch.randint(graph.nodes[graph.schema.seed_type], (2 * batch,), device=cases.DEVICE).unique()
        return papers[torch.randperm(len(papers), device=cases.DEVICE)[:batch]].int()

    first = function(graph, FANOUTS, largest)
    counts = [
        first(seeds(), batch, torch.tensor(seed, device=cases.DEVICE)).counts.tolist() for seed in range(ESTIMATED)
    ]
    shape = enough_shape(moments(counts), largest, SIGMA)
    del first
    sampler = function(graph, FANOUTS, shape)
    drawn, seed = seeds(), torch.tensor(ESTIMATED, device=cases.DEVICE)
    block = sampler(drawn, batch, seed)
    nodes, edges = int(block.node_counts[-1].sum()), int(block.edge_counts[-1].sum())
    written = sum(tensor.numel() * tensor.element_size() for tensor in block.tensors().values())
    return [Pass("forward", lambda: sampler(drawn, batch, seed), float(SECTOR * (2 * edges + nodes) + written))]


def entries() -> list[Entry]:
    """The version that can be captured."""
    captured = {"triton": sample.IMPLEMENTATIONS["triton"]}
    return each("sample", captured, "triton", {}, case)


def sweeps() -> dict[str, Sweep]:
    """Items and warps, by what a program works on."""
    from benchmarks.rgat.ops.sample import triton

    tiles = list(itertools.product((64, 128, 256, 512, 1024), (1, 2, 4, 8)))
    build = functools.partial(case, sample.IMPLEMENTATIONS["triton"].function, SEEDS)
    return {f"sample {key}": Sweep(triton.TILES, key, tiles, build, False) for key in triton.TILES}
