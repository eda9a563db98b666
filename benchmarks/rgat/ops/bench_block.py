"""Blocks that R-GAT's operations are measured with: what its sampler finds in a made-up eighth of IGBH-Full."""

from __future__ import annotations

import functools

import torch

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.capacities import enough_shape, largest_shape
from benchmarks.rgat.graph import Graph
from benchmarks.rgat.made_up_graph import IGBH_EIGHTH, made_up_igbh
from benchmarks.rgat.ops import sample
from benchmarks.rgat.sampling import BuildSampler, SeedBatch, measured
from common.ops.operation import AUTO, OperationRequest

FANOUTS = (15, 10, 5)

MEASURED, SIGMA = 20, 5.0
"""Batches that room is found from, and deviations above their mean."""


def bench_graph(device: torch.device, papers: int = IGBH_EIGHTH) -> Graph:
    """The graph, of 7 GB; with fewer papers it has less of all types."""
    return made_up_igbh(papers, 0, device)


def bench_seeds(graph: Graph, seeds: int, number: int) -> SeedBatch:
    """So many papers; others for another number."""
    random = torch.Generator(graph.device).manual_seed(number)
    papers = torch.randperm(graph.nodes[graph.schema.seed_type], device=graph.device, generator=random)
    return SeedBatch(papers[:seeds].int(), min(seeds, len(papers)), torch.tensor(number, device=graph.device))


def bench_room(graph: Graph, seeds: int, build: BuildSampler) -> BlockShape:
    """Room as training finds it; waits for the device."""
    batches = (bench_seeds(graph, seeds, number) for number in range(1, MEASURED + 1))
    moments = measured(graph, FANOUTS, build, seeds, batches)
    return enough_shape(moments, largest_shape(graph, seeds, FANOUTS), SIGMA)


@functools.lru_cache(maxsize=2)
def bench_block(seeds: int, device: torch.device, papers: int = IGBH_EIGHTH) -> Block:
    """A block with the room of training; waits for the device.

    Raises:
        RuntimeError: that room is too little.
    """
    graph = bench_graph(device, papers)
    build = sample.SAMPLE.select(AUTO, OperationRequest(device, torch.int32)).function
    batch = bench_seeds(graph, seeds, 0)
    block: Block = build(graph, FANOUTS, bench_room(graph, seeds, build))(batch.seeds, batch.count, batch.seed)
    if int(block.overflow):
        raise RuntimeError(f"{block.shape} is too little for the block of {seeds} seeds")
    return block
