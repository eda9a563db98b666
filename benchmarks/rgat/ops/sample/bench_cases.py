"""Sampling around the seeds of a micro-batch, in a made-up eighth of IGBH-Full: what one of eight GPUs has."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from benchmarks.rgat.graph import Graph
from benchmarks.rgat.ops import sample
from benchmarks.rgat.ops.bench_block import FANOUTS, bench_graph, bench_room, bench_seeds
from benchmarks.rgat.ops.sample.sampler import Sampler
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

SEEDS = 2048
"""Of a micro-batch, at which tiles are tried."""

SECTOR = 32
"""Bytes that a GPU reads or writes at least."""


@functools.cache
def _graph() -> Graph:
    return bench_graph(torch.device(cases.DEVICE))


def case(function: Callable[..., Sampler], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Two accesses at random of an edge, to its source and to that one's stamp, and one of a node, to put that back."""
    graph = _graph()
    sampler, drawn = function(graph, FANOUTS, bench_room(graph, batch, function)), bench_seeds(graph, batch, 0)
    block = sampler(drawn.seeds, drawn.count, drawn.seed)
    nodes, edges = int(block.node_counts[-1].sum()), int(block.edge_counts[-1].sum())
    written = sum(tensor.numel() * tensor.element_size() for tensor in block.tensors().values())
    work = functools.partial(sampler, drawn.seeds, drawn.count, drawn.seed)
    return [Pass("forward", work, float(SECTOR * (2 * edges + nodes) + written))]


def entries() -> list[Entry]:
    """The version that can be captured."""
    return each("sample", sample.SAMPLE, "triton", {}, case, only=["triton"])


def sweeps() -> dict[str, Sweep]:
    """Items and warps, by what a program works on."""
    from benchmarks.rgat.ops.sample import triton

    tiles = list(itertools.product((64, 128, 256, 512, 1024), (1, 2, 4, 8)))
    build = functools.partial(case, sample.SAMPLE.function("triton"), SEEDS)
    return {f"sample {key}": Sweep(triton.TILES, key, tiles, build, False) for key in triton.TILES}
