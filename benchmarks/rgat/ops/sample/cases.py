"""Test and benchmark cases of sampling: the seeds of a micro-batch, in a synthetic eighth of IGBH-Full."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from benchmarks.rgat.graph import BlockShape, Graph
from benchmarks.rgat.ops.block_of_cases import FANOUTS, SEEDS, capacities_of_cases, graph_of_cases
from benchmarks.rgat.ops.sample.reference import NeighborSampler
from benchmarks.rgat.synthetic import IGBH_EIGHTH
from common.ops.cases import Case, Draw, Pass, size_of

SECTOR = 32
"""Smallest number of bytes that a GPU reads or writes."""


@functools.lru_cache(maxsize=1)
def _graph(device: torch.device, papers: int, seeds: int, fanouts: Sequence[int]) -> tuple[Graph, BlockShape]:
    graph = graph_of_cases(device, papers)
    return graph, capacities_of_cases(graph, seeds, fanouts)


def passes(
    function: Callable[..., NeighborSampler],
    draw: Draw,
    seeds: int,
    papers: int,
    fanouts: tuple[int, ...],
    count: int,
    share: float = 1.0,
) -> list[Pass]:
    """Return the forward pass.

    Bytes count two random accesses per edge (to its source and to the stamp of the source), one per node (which
    restores the stamp), and the block that is written.

    Args:
        seeds: capacity for seeds. See :func:`benchmarks.rgat.ops.block_of_cases.block_of_cases`, also for ``papers``
            and ``fanouts``.
        count: number of seeds.
        share: fraction of the capacities of training. Below 1, nodes, edges and rows are left out.
    """
    graph, shape = _graph(draw.device, papers, seeds, fanouts)
    papers_N = draw.permutation(papers).int()
    if share < 1:
        shape = _smaller(shape, share)
    sampler, seed = function(graph, fanouts, shape), draw.seed()
    given = papers_N[:seeds], torch.tensor([count], dtype=torch.int32, device=draw.device), seed
    block = sampler(*given)  # must leave no trace in the graph's stamps
    schema, offsets = shape.schema, shape.node_offsets(shape.hops)
    nodes, edges, rows = (each.tolist() for each in (block.node_counts, block.edge_counts[-1], block.row_counts[-1]))

    def sample() -> object:
        found = sampler(*given)
        per_relation = [
            (
                found.indptr[shape.indptr_offsets[number] :][: nodes[-2][target] + 1],
                found.edge_row[shape.edge_offsets[number] :][: edges[number]],
                found.edge_target[shape.edge_offsets[number] :][: edges[number]],
                found.rows[shape.row_offsets(shape.hops)[number] :][: rows[number]],
                found.node_row[shape.node_row_offsets[number] :][: nodes[-2][source]],
                found.row_indptr[shape.row_indptr_offsets[number] :][: rows[number] + 1],
                found.row_edges[shape.edge_offsets[number] :][: edges[number]],
            )
            for number, (source, target) in enumerate(zip(schema.sources, schema.targets, strict=True))
        ]
        of_types = [found.nodes[first:][:there] for first, there in zip(offsets, nodes[-1], strict=False)]
        return found.counts, of_types, per_relation

    written = size_of(*block.tensors().values())
    return [Pass("forward", sample, SECTOR * (2.0 * sum(edges) + sum(nodes[-1])) + written)]


def _smaller(shape: BlockShape, share: float) -> BlockShape:
    """Return a fraction of the capacities, with all seeds."""

    def part(table: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(max(min(size, 1), int(share * size)) for size in line) for line in table)

    return BlockShape(shape.schema, (shape.nodes[0], *part(shape.nodes[1:])), part(shape.edges), part(shape.rows))


SIZES = {"seeds": SEEDS, "papers": IGBH_EIGHTH, "fanouts": FANOUTS, "count": SEEDS}

CASES = (
    Case(
        "IGBH",
        passes,
        SIZES,
        tests=[
            {"seeds": 6, "papers": 500, "fanouts": (16, 5), "count": 5},
            {"seeds": 4, "papers": 60, "fanouts": (3, 2, 1), "count": 4, "share": 0.6},
            {"seeds": 9, "papers": 60, "fanouts": (1,), "count": 9},
            {"seeds": 9, "papers": 60, "fanouts": (2, 1, 1, 1), "count": 0},
        ],
        gpu={"seeds": 128, "papers": IGBH_EIGHTH // 64, "count": 100},
        dtypes=(torch.float32,),
        exact=True,
    ),
)
