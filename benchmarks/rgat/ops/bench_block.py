"""A sampled block of the size and shape of IGBH's, of random edges: what operations are measured with.

Nodes, edges and rows are numbered as :mod:`benchmarks.rgat.block` says; degrees and popularity follow those of the
data set, so that rows are shared, and long, as there.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.schema import Schema

TYPES = {
    "paper": 33_668_272, "author": 34_652_610, "fos": 712_960, "institute": 26_918, "journal": 49_052,
    "conference": 4_547,
}  # fmt: skip
"""Nodes of an eighth of IGBH-Full; the small types are whole."""

STORED = (
    "paper__cites__paper", "paper__written_by__author", "author__affiliated_to__institute", "paper__topic__fos",
    "paper__published__journal", "paper__venue__conference",
)  # fmt: skip

MEAN_DEGREE = (30.0, 2.6, 1800.0, 1470.0, 1600.0, 18000.0, 2.7, 0.175, 3.9, 0.3, 0.3)
"""Edges into a target, by relation of the augmented schema."""

POPULARITY = {"paper": 2.0, "author": 1.5, "fos": 4.0, "institute": 3.0, "journal": 3.0, "conference": 3.0}
"""Node floor(n u^k) of n is drawn, u being uniform: with k = 4 one node of 700,000 has 3 % of the edges."""

FANOUTS = (15, 10, 5)
ROOM = 1.05
"""Room by what is filled."""


class _Found(NamedTuple):
    """Numbers given so far.

    Attributes:
        number: [population], -1 where there is none.
        order: what got numbers, in their order.
    """

    number: Tensor
    order: list[Tensor]

    @property
    def found(self) -> int:
        return sum(len(part) for part in self.order)

    def add(self, drawn: Tensor) -> Tensor:
        """Numbers of what was drawn; who has none gets one, in the order of first draws."""
        position = torch.arange(len(drawn), device=drawn.device)
        first = torch.full_like(self.number, len(drawn)).scatter_reduce_(0, drawn, position, "amin")
        new = drawn[(first[drawn] == position) & (self.number[drawn] < 0)]
        self.number[new] = self.found + torch.arange(len(new), device=drawn.device)
        self.order.append(new)
        return self.number[drawn]


def _nothing(population: int, device: torch.device) -> _Found:
    return _Found(torch.full((population,), -1, device=device), [])


def _degrees(targets: int, mean: float, fanout: int, random: torch.Generator) -> Tensor:
    """Of so many targets: geometric, and at most the fanout."""
    drawn = -torch.rand(targets, device=random.device, generator=random).clamp(min=1e-9).log() * (mean + 0.5)
    return drawn.long().clamp(max=fanout)


@functools.lru_cache(maxsize=2)
def bench_block(seeds: int, device: torch.device, scale: int = 1) -> Block:
    """A block around so many seeds; waits for the device.

    Args:
        seeds: papers.
        device: where it is made.
        scale: what the numbers of nodes are divided by.
    """
    random = torch.Generator(device).manual_seed(0)
    schema = Schema.augmented(tuple(TYPES), STORED, "paper")
    population = [max(nodes // scale, 1) for nodes in TYPES.values()]
    nodes = [_nothing(count, device) for count in population]
    rows = [_nothing(population[source], device) for source in schema.sources]
    edge_row: list[list[Tensor]] = [[] for _ in schema.relations]
    degrees: list[list[Tensor]] = [[] for _ in schema.relations]
    nodes[schema.seed_type].add(torch.arange(seeds, device=device))
    counts: tuple[list[list[int]], ...] = ([[numbered.found for numbered in nodes]], [], [])
    for hop, fanout in enumerate(FANOUTS):
        before = counts[0][hop - 1] if hop else [0] * len(nodes)
        frontier = [within - earlier for within, earlier in zip(counts[0][hop], before, strict=True)]
        for relation, (source, target) in enumerate(zip(schema.sources, schema.targets, strict=True)):
            degree = _degrees(frontier[target], MEAN_DEGREE[relation], fanout, random)
            uniform = torch.rand(int(degree.sum()), device=device, generator=random, dtype=torch.float64)
            power = POPULARITY[schema.types[source]]
            drawn = (uniform**power * population[source]).long().clamp(max=population[source] - 1)
            nodes[source].add(drawn)
            edge_row[relation].append(rows[relation].add(drawn))
            degrees[relation].append(degree)
        counts[0].append([numbered.found for numbered in nodes])
        counts[1].append([sum(len(part) for part in parts) for parts in edge_row])
        counts[2].append([numbered.found for numbered in rows])
    return _written(schema, counts, nodes, rows, edge_row, degrees, device)


def _written(
    schema: Schema,
    counts: tuple[list[list[int]], ...],
    nodes: list[_Found],
    rows: list[_Found],
    edge_row: list[list[Tensor]],
    degrees: list[list[Tensor]],
    device: torch.device,
) -> Block:
    """The block of what was drawn."""
    room = [tuple(tuple(int(count * ROOM) + 1 for count in line) for line in table) for table in counts]
    shape = BlockShape(schema, (tuple(counts[0][0]), *room[0][1:]), room[1], room[2])
    block = Block.empty(shape, device)
    for tensor in block.tensors().values():
        tensor.zero_()
    flat = [count for table in counts for line in table for count in line]
    block.counts.copy_(torch.tensor([*flat, 0]))

    def write(tensor: Tensor, first: int, values: Tensor) -> None:
        tensor[first : first + len(values)] = values

    def write_ends(tensor: Tensor, offsets: tuple[int, ...], relation: int, sizes: Tensor) -> None:
        first = offsets[relation]
        tensor[first : offsets[relation + 1]] = sizes.sum()
        tensor[first] = 0
        write(tensor, first + 1, sizes.cumsum(0))

    for kind, found in enumerate(nodes):
        write(block.nodes, shape.node_offsets(shape.hops)[kind], torch.cat(found.order))
    for relation, source in enumerate(schema.sources):
        row, degree = torch.cat(edge_row[relation]), torch.cat(degrees[relation])
        first = shape.edge_offsets[relation]
        write(block.edge_row, first, row)
        write(block.edge_target, first, torch.arange(len(degree), device=device).repeat_interleave(degree))
        write(block.row_edges, first, row.argsort(stable=True))
        write_ends(block.indptr, shape.indptr_offsets, relation, degree)
        own = row.bincount(minlength=rows[relation].found)
        write_ends(block.row_indptr, shape.row_indptr_offsets, relation, own)
        of_type = torch.cat(rows[relation].order)
        write(block.rows, shape.row_offsets(shape.hops)[relation], nodes[source].number[of_type])
        within = torch.cat(nodes[source].order)[: counts[0][-2][source]]
        write(block.node_row, shape.node_row_offsets[relation], rows[relation].number[within])
    return block
