"""Blocks of the cases of R-GAT's operations: what its sampler finds in a synthetic eighth of IGBH-Full."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.capacities import enough_shape, largest_shape
from benchmarks.rgat.graph import Graph
from benchmarks.rgat.made_up_graph import IGBH_EIGHTH, made_up_igbh
from benchmarks.rgat.ops import sample
from benchmarks.rgat.sampling import BuildSampler, SeedBatch, measured
from common.ops.operation import AUTO, REFERENCE, OperationRequest

SEEDS = 2048
"""Seeds of a micro-batch."""

FANOUTS = (15, 10, 5)

SKEW = 0.75
"""How much more edges popular nodes have; see :func:`benchmarks.rgat.made_up_graph.made_up_graph`."""

MEASURED, SIGMA = 20, 5.0
"""Batches that capacities are derived from, and standard deviations above their mean."""


def graph_of_cases(device: torch.device, papers: int = IGBH_EIGHTH, skew: float = SKEW) -> Graph:
    """The graph, of 7 GB; with fewer papers it has less of all types."""
    return made_up_igbh(papers, 0, device, skew)


def seeds_of_cases(graph: Graph, seeds: int, number: int) -> SeedBatch:
    """``seeds`` papers; others for another ``number``."""
    random = torch.Generator(graph.device).manual_seed(number)
    papers = torch.randperm(graph.nodes[graph.schema.seed_type], device=graph.device, generator=random)
    return SeedBatch(papers[:seeds].int(), min(seeds, len(papers)), torch.tensor(number, device=graph.device))


def sampler_of_cases(device: torch.device) -> BuildSampler:
    """The sampler's fastest implementation on a GPU. On a CPU it is the reference: an interpreter takes long."""
    request = OperationRequest(device, torch.int32)
    build: BuildSampler = sample.SAMPLE.select(AUTO if device.type == "cuda" else REFERENCE, request).function
    return build


def capacities_of_cases(graph: Graph, seeds: int, fanouts: Sequence[int] = FANOUTS) -> BlockShape:
    """Capacities as training finds them; waits for the device."""
    batches = (seeds_of_cases(graph, seeds, number) for number in range(1, MEASURED + 1))
    moments = measured(graph, fanouts, sampler_of_cases(graph.device), seeds, batches)
    return enough_shape(moments, largest_shape(graph, seeds, fanouts), SIGMA)


@functools.lru_cache(maxsize=2)
def block_of_cases(
    device: torch.device,
    seeds: int,
    papers: int = IGBH_EIGHTH,
    fanouts: tuple[int, ...] = FANOUTS,
    skew: float = SKEW,
) -> Block:
    """A block with the capacities of training; waits for the device.

    Raises:
        RuntimeError: these capacities are too small.
    """
    graph = graph_of_cases(device, papers, skew)
    batch, shape = seeds_of_cases(graph, seeds, 0), capacities_of_cases(graph, seeds, fanouts)
    block = sampler_of_cases(device)(graph, fanouts, shape)(batch.seeds, batch.count, batch.seed)
    if int(block.overflow):
        raise RuntimeError(f"{shape} is too small for the block of {seeds} seeds")
    return block


class Filled(NamedTuple):
    """Which parts of a tensor a block fills.

    Attributes:
        offsets: first index of each part.
        counts: how much of each is filled.
    """

    offsets: Sequence[int]
    counts: Sequence[int]

    @property
    def total(self) -> int:
        """All that is filled."""
        return sum(self.counts)

    def views(self, x: Tensor) -> list[Tensor]:
        """The filled parts of a tensor."""
        return [x[first : first + count] for first, count in zip(self.offsets, self.counts, strict=False)]

    def only(self, x: Tensor) -> Tensor:
        """The tensor, after NaN was written to everything that is not filled."""
        for first, count, end in zip(self.offsets, self.counts, (*self.offsets[1:], len(x)), strict=False):
            x[first + count : end] = torch.nan
        return x


class Level(NamedTuple):
    """What a block fills at a level.

    Attributes:
        nodes: in tensors of all nodes within ``level`` hops.
        outputs: in tensors of all nodes within ``level - 1`` hops.
        rows: in tensors of the rows of all relations.
        targets: in tensors of the targets of all relations.
    """

    nodes: Filled
    outputs: Filled
    rows: Filled
    targets: Filled


def level_of(block: Block, level: int) -> Level:
    """What a block fills at ``level``; waits for the device."""
    shape, nodes, rows = block.shape, block.node_counts.tolist(), block.row_counts.tolist()
    return Level(
        Filled(shape.node_offsets(level), nodes[level]),
        Filled(shape.node_offsets(level - 1), nodes[level - 1]),
        Filled(shape.row_offsets(level), rows[level - 1]),
        Filled(shape.target_offsets(level), [nodes[level - 1][target] for target in shape.schema.targets]),
    )
