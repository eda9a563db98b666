"""Random graphs with the skew of real ones, from a handful of nodes to a share of IGBH that fills a GPU.

The nodes of a type have ranks of popularity. With skew s, the share x of most popular nodes has the share x^(1 - s) of
all edges, as targets and as sources: degrees follow a power law with the exponent 1 + 1/s at both ends of an edge, as
in a graph whose citations go both ways. Ranks are spread over a type's numbers by an affine map, as a permutation of
the nodes would. Relations are drawn apart: a reversed one has the degrees of its kind, not the edges of the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rgat.graph import Graph
from benchmarks.rgat.raw import FULL, NODES, published
from benchmarks.rgat.schema import Relation, Schema

PIECE = 1 << 24
"""Targets, or edges, that are drawn at a time."""

GOLDEN = (math.sqrt(5) - 1) / 2
"""Neighbours in rank lie this share of all nodes apart, which no small multiple brings together."""


@dataclass(frozen=True)
class _Spread:
    """Number of the node of a rank: rank * factor modulo the nodes."""

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


def made_up_graph(
    schema: Schema,
    nodes: Sequence[int],
    degrees: Mapping[str, float],
    seed: int,
    device: torch.device,
    skew: float = 0.5,
) -> Graph:
    """A random graph of one shard, the same for the same seed on the same kind of device.

    Args:
        schema: its types and relations.
        nodes: of each type.
        degrees: mean number of edges of a target, by relation; none for the relations that are left out.
        seed: of the generator.
        device: that makes it and holds it; beyond the graph it needs about 1 GB.
        skew: s, 0 for equal nodes to less than 1.

    Raises:
        ValueError: ``degrees`` names another relation, or ``skew`` is none.
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
        starts = _starts(nodes[target], degrees.get(str(relation), 0.0), skew, generator)
        indptr.append((starts,))
        indices.append((_sources(nodes[source], int(starts[-1]), skew, generator),))
    return Graph(schema, tuple(nodes), tuple(indptr), tuple(indices), device)


def _starts(targets: int, mean: float, skew: float, generator: torch.Generator) -> Tensor:
    """[targets + 1], int64: where the edges of each begin; a degree's fraction is the chance of one more."""
    spread = _Spread.over(targets)
    starts = torch.zeros(targets + 1, dtype=torch.int64, device=generator.device)
    for first in range(0, targets, PIECE):
        piece = torch.arange(first, min(first + PIECE, targets), device=generator.device)
        rank = spread.rank(piece).double().div_(targets)
        weight = (rank + 1 / targets).pow_(1 - skew).sub_(rank.pow_(1 - skew)).mul_(mean * targets)
        chance = torch.rand(len(piece), dtype=torch.float64, device=generator.device, generator=generator)
        part = starts[first + 1 : first + 1 + len(piece)]
        part.copy_(weight.add_(chance))  # rounded down
        part.copy_(part.cumsum(0)).add_(starts[first])
    return starts


def _sources(nodes: int, edges: int, skew: float, generator: torch.Generator) -> Tensor:
    """[edges], int32: popular nodes more often."""
    spread = _Spread.over(nodes)
    sources = torch.empty(edges, dtype=torch.int32, device=generator.device)
    for part in sources.split(PIECE):
        share = torch.rand(len(part), dtype=torch.float64, device=generator.device, generator=generator)
        rank = share.pow_(1 / (1 - skew)).mul_(nodes).long().clamp_(max=nodes - 1)
        part.copy_(spread.number(rank))
    return sources


IGBH_EDGES = {
    "paper__cites__paper": 7_992_884_008,  # both ways, with two self-loops of each paper
    "paper__written_by__author": 716_761_549,
    "author__affiliated_to__institute": 48_521_486,
    "paper__topic__fos": 1_050_280_600,
    "paper__published__journal": 80_803_852,  # a guess: 0.3 of each paper
    "paper__venue__conference": 80_803_852,
}
"""Of IGBH-Full; every relation but the first has as many reversed edges."""

IGBH_EIGHTH = 33_668_272
"""Papers of an eighth of IGBH-Full, what each of eight GPUs has."""

PER_PAPER = 1.0
"""Nodes, and edges of a relation, to a paper, where IGBH has none of the kind."""


def igbh_proportions(schema: Schema, papers: int) -> tuple[list[int], dict[str, float]]:
    """Nodes of each type, and mean edges of a target by relation, of IGBH-Full with so many papers."""
    igbh = NODES[FULL]
    share, other = papers / igbh["paper"], PER_PAPER * igbh["paper"]
    nodes = [max(1, round(igbh.get(name, other) * share)) for name in schema.types]

    def edges(relation: Relation) -> float:
        return IGBH_EDGES.get(str(relation), IGBH_EDGES.get(str(relation.reverse), other))

    pairs = zip(schema.relations, schema.targets, strict=True)
    return nodes, {str(relation): edges(relation) * share / nodes[target] for relation, target in pairs}


def made_up_igbh(
    papers: int, seed: int, device: torch.device, skew: float = 0.75, schema: Schema | None = None
) -> Graph:
    """A random graph in the proportions of IGBH-Full.

    With this skew, a seed's block of fanouts 15, 10, 5 has about 1,300 nodes and 2,600 edges where one paper in 17,000
    is a seed, as 2,048 of an eighth are; with 0.5 it has 2,050 and 3,250.

    Args:
        papers: as many; of the other types, and edges, in proportion.
        seed, device, skew: see :func:`made_up_graph`.
        schema: its types and relations; None for those of IGBH-Full.
    """
    schema = published(FULL).schema if schema is None else schema
    return made_up_graph(schema, *igbh_proportions(schema, papers), seed, device, skew)
