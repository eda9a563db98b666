"""Blocks for the cases of R-GAT's operations, sampled from a synthetic eighth of IGBH-Full."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock
from benchmarks.rgat.ops import sample
from benchmarks.rgat.sampling import BuildSampler, SeedBatch, enough_shape, largest_shape, sampled_moments
from benchmarks.rgat.synthetic import IGBH_EIGHTH, synthetic_igbh
from common.ops.operation import AUTO, REFERENCE, OperationRequest

SEEDS = 2048
"""Seeds of a micro-batch."""

FANOUTS = (15, 10, 5)

SKEW = 0.75
"""How unevenly edges are distributed over nodes; see :func:`benchmarks.rgat.synthetic.synthetic_graph`."""

MEASURED, SIGMA = 20, 5.0
"""Number of batches from which capacities are estimated, and standard deviations above their mean."""


def graph_of_cases(device: torch.device, papers: int = IGBH_EIGHTH, skew: float = SKEW) -> Graph:
    """Return the graph, which takes 7 GB. With fewer papers, all types have fewer nodes."""
    return synthetic_igbh(papers, 0, device, skew)


def seeds_of_cases(graph: Graph, seeds: int, number: int) -> SeedBatch:
    """Return ``seeds`` random papers. Another ``number`` gives other papers."""
    random = torch.Generator(graph.device).manual_seed(number)
    papers = torch.randperm(graph.nodes[graph.schema.seed_type], device=graph.device, generator=random)
    return SeedBatch(papers[:seeds].int(), min(seeds, len(papers)), torch.tensor(number, device=graph.device))


def sampler_of_cases(device: torch.device) -> BuildSampler:
    """Return the fastest sampler on a GPU, and the reference on a CPU, where Triton's interpreter would be slow."""
    request = OperationRequest(device, torch.int32)
    build: BuildSampler = sample.SAMPLE.select(AUTO if device.type == "cuda" else REFERENCE, request).function
    return build


def capacities_of_cases(graph: Graph, seeds: int, fanouts: Sequence[int] = FANOUTS) -> BlockShape:
    """Return capacities, estimated as in training. Waits for the device."""
    batches = (seeds_of_cases(graph, seeds, number) for number in range(1, MEASURED + 1))
    moments = sampled_moments(graph, fanouts, sampler_of_cases(graph.device), seeds, batches)
    return enough_shape(moments, largest_shape(graph, seeds, fanouts), SIGMA)


@functools.lru_cache(maxsize=2)
def block_of_cases(
    device: torch.device,
    seeds: int,
    papers: int = IGBH_EIGHTH,
    fanouts: tuple[int, ...] = FANOUTS,
    skew: float = SKEW,
) -> SampledBlock:
    """Return a block with the capacities of training. Waits for the device.

    Args:
        papers: papers of the graph.
        fanouts: edges of each relation that a node draws, by hop.

    Raises:
        RuntimeError: the capacities are too small for the block.
    """
    graph = graph_of_cases(device, papers, skew)
    batch, shape = seeds_of_cases(graph, seeds, 0), capacities_of_cases(graph, seeds, fanouts)
    block = sampler_of_cases(device)(graph, fanouts, shape)(batch.seeds, batch.count, batch.seed)
    if int(block.overflow):
        raise RuntimeError(f"{shape} is too small for the block of {seeds} seeds")
    return block


class FilledParts(NamedTuple):
    """The parts of a tensor that a block fills.

    Attributes:
        offsets: first index of each part.
        counts: number of filled elements of each part.
    """

    offsets: Sequence[int]
    counts: Sequence[int]

    @property
    def total(self) -> int:
        """Number of all filled elements."""
        return sum(self.counts)

    def views(self, x: Tensor) -> list[Tensor]:
        """Return the filled parts of a tensor."""
        return [x[first : first + count] for first, count in zip(self.offsets, self.counts, strict=False)]

    def only(self, x: Tensor) -> Tensor:
        """Write NaN to all elements that are not filled, and return the tensor."""
        for first, count, end in zip(self.offsets, self.counts, (*self.offsets[1:], len(x)), strict=False):
            x[first + count : end] = torch.nan
        return x


class FilledLevel(NamedTuple):
    """The parts of tensors that a block fills at a level.

    Attributes:
        nodes: parts of tensors with all nodes within ``level`` hops.
        outputs: parts of tensors with all nodes within ``level - 1`` hops.
        rows: parts of tensors with the rows of all relations.
        targets: parts of tensors with the targets of all relations.
    """

    nodes: FilledParts
    outputs: FilledParts
    rows: FilledParts
    targets: FilledParts


def level_of(block: SampledBlock, level: int) -> FilledLevel:
    """Return the parts of tensors that a block fills at ``level``. Waits for the device."""
    shape, nodes, rows = block.shape, block.node_counts.tolist(), block.row_counts.tolist()
    return FilledLevel(
        FilledParts(shape.node_offsets(level), nodes[level]),
        FilledParts(shape.node_offsets(level - 1), nodes[level - 1]),
        FilledParts(shape.row_offsets(level), rows[level - 1]),
        FilledParts(shape.target_offsets(level), [nodes[level - 1][target] for target in shape.schema.targets]),
    )
