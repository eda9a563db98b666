"""Generator of synthetic graphs with realistic skew, from a few nodes to a fraction of IGBH that fills a GPU.

Nodes of a type are ranked by popularity. With skew s, the most popular fraction x of the nodes has the fraction
x^(1-s) of all edges. Degrees follow a power law with exponent 1 + 1/s. An affine map from popularity rank to node
number replaces a permutation. With several classes, node i has class i modulo the number of classes, and each class has
its own ranks.

Graphs in memory, for warm-up and bench, have skew at both ends of an edge, as in a graph whose citations go both ways.
Their relations are independent: a reversed relation has realistic degrees, but not the edges of its counterpart.
:mod:`benchmarks.rgat.stand_in` writes raw files with communities, from the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rgat.graph import Graph, Relation, Schema
from benchmarks.rgat.raw import FULL, NODES, published

PIECE = 1 << 24
"""Targets, or edges, that are drawn at once."""

GOLDEN = (math.sqrt(5) - 1) / 2  # no small multiple is close to an integer, so popular nodes are spread evenly
"""Distance between the nodes of adjacent popularity ranks, as a fraction of all nodes."""


@dataclass(frozen=True)
class _Spread:
    """Map from popularity rank to node number: rank * factor modulo the number of nodes."""

    nodes: int
    factor: int

    @classmethod
    def over(cls, nodes: int) -> _Spread:
        factor = max(1, round(nodes * GOLDEN))
        while math.gcd(factor, nodes) != 1:
            factor += 1
        return cls(nodes, factor)

    def number(self, rank: Tensor) -> Tensor:
        return rank.mul_(self.factor).remainder_(self.nodes)

    def rank(self, number: Tensor) -> Tensor:
        return number.mul_(pow(self.factor, -1, self.nodes)).remainder_(self.nodes)


def synthetic_graph(
    schema: Schema,
    nodes: Sequence[int],
    degrees: Mapping[str, float],
    seed: int,
    device: torch.device,
    skew: float = 0.5,
) -> Graph:
    """Return a random graph of one shard. The same seed on the same kind of device gives the same graph.

    Args:
        nodes: number of nodes of each type.
        degrees: mean edges per target, by relation; missing relations have no edges.
        device: device of the graph; building it takes about 1 GB more than the graph.
        skew: s, from 0 (all nodes equal) to less than 1.

    Raises:
        ValueError: ``degrees`` names an unknown relation, or ``skew`` is out of range.
    """
    unknown = degrees.keys() - {str(relation) for relation in schema.relations}
    if unknown:
        raise ValueError(f"no such relation: {', '.join(sorted(unknown))}")
    if not 0 <= skew < 1:
        raise ValueError(f"skew={skew}: 0 to less than 1")
    indptr, indices = [], []
    for number, (relation, source, target) in enumerate(
        zip(schema.relations, schema.sources, schema.targets, strict=True)
    ):
        generator = torch.Generator(device).manual_seed(seed + number)
        starts = draw_starts(nodes[target], degrees.get(str(relation), 0.0), skew, generator)
        indptr.append((starts,))
        indices.append((draw_ends(nodes[source], int(starts[-1]), skew, generator),))
    return Graph(schema, tuple(nodes), tuple(indptr), tuple(indices), device)


def draw_starts(nodes: int, mean: float, skew: float, generator: torch.Generator) -> Tensor:
    """Return the first edge of each node, [nodes + 1], int64; ``mean`` is the mean number of edges per node."""
    spread = _Spread.over(nodes)
    starts = torch.zeros(nodes + 1, dtype=torch.int64, device=generator.device)
    for first in range(0, nodes, PIECE):
        piece = torch.arange(first, min(first + PIECE, nodes), device=generator.device)
        rank = spread.rank(piece).double().div_(nodes)
        weight = (rank + 1 / nodes).pow_(1 - skew).sub_(rank.pow_(1 - skew)).mul_(mean * nodes)
        chance = torch.rand(len(piece), dtype=torch.float64, device=generator.device, generator=generator)
        part = starts[first + 1 : first + 1 + len(piece)]
        part.copy_(weight.add_(chance))  # rounds down; the fraction is the probability of one more edge
        part.copy_(part.cumsum(0)).add_(starts[first])
    return starts


def draw_ends(nodes: int, edges: int, skew: float, generator: torch.Generator, classes: int = 1) -> Tensor:
    """Return a node for each edge, [edges], int32, all of class 0; popular nodes are more frequent.

    Args:
        classes: number of classes, at most ``nodes``. A number from 0 to ``classes`` - 1, added to a node, gives a node
            of that class with the same popularity.
    """
    members = nodes // classes
    spread = _Spread.over(members)
    ends = torch.empty(edges, dtype=torch.int32, device=generator.device)
    for part in ends.split(PIECE):
        share = torch.rand(len(part), dtype=torch.float64, device=generator.device, generator=generator)
        rank = share.pow_(1 / (1 - skew)).mul_(members).long().clamp_(max=members - 1)
        part.copy_(spread.number(rank).mul_(classes))
    return ends


IGBH_EDGES = {
    "paper__cites__paper": 7_992_884_008,  # both directions, with two self-loops per paper
    "paper__written_by__author": 716_761_549,
    "author__affiliated_to__institute": 48_521_486,
    "paper__topic__fos": 1_050_280_600,
    "paper__published__journal": 80_803_852,  # estimated as 0.3 per paper
    "paper__venue__conference": 80_803_852,
}
"""Edges of IGBH-Full; every relation but the first has as many reversed edges."""

IGBH_EIGHTH = 33_668_272
"""Papers of an eighth of IGBH-Full, the share of each of eight GPUs."""

PER_PAPER = 1.0
"""Nodes per paper, and edges per paper, for types and relations that IGBH does not have."""


def igbh_proportions(schema: Schema, papers: int) -> tuple[list[int], dict[str, float]]:
    """Return nodes of each type and mean edges per target by relation: IGBH-Full scaled to ``papers`` papers."""
    igbh = NODES[FULL]
    share, other = papers / igbh["paper"], PER_PAPER * igbh["paper"]
    nodes = [max(1, round(igbh.get(name, other) * share)) for name in schema.types]

    def edges(relation: Relation) -> float:
        return IGBH_EDGES.get(str(relation), IGBH_EDGES.get(str(relation.reverse), other))

    pairs = zip(schema.relations, schema.targets, strict=True)
    return nodes, {str(relation): edges(relation) * share / nodes[target] for relation, target in pairs}


def synthetic_igbh(
    papers: int, seed: int, device: torch.device, skew: float = 0.75, schema: Schema | None = None
) -> Graph:
    """Return a random graph in the proportions of IGBH-Full.

    With the default skew and fanouts 15, 10, 5, a block has about 1,300 nodes and 2,600 edges per seed if one paper
    in 17,000 is a seed (2,048 seeds in an eighth of IGBH). With skew 0.5 it has 2,050 nodes and 3,250 edges.

    Args:
        papers: number of papers; other nodes and edges in proportion.
        seed, device, skew: see :func:`synthetic_graph`.
        schema: types and relations; None for those of IGBH-Full.
    """
    schema = published(FULL).schema if schema is None else schema
    return synthetic_graph(schema, *igbh_proportions(schema, papers), seed, device, skew)
