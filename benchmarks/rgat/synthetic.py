"""Synthetic graphs: in memory with realistic skew, and raw files in IGBH's layout with communities.

Nodes of a type are ranked by popularity. With skew s, the most popular fraction x of the nodes has the fraction
x^(1-s) of all edges. Degrees follow a power law with exponent 1 + 1/s. An affine map from popularity rank to node
number replaces a permutation. With several classes, node i has class i modulo the number of classes, and each class has
its own ranks.

Graphs in memory, for warm-up and bench, have from a few nodes to a fraction of IGBH that fills a GPU. They have skew at
both ends of an edge, as in a graph whose citations go both ways. Their relations are independent: a reversed relation
has realistic degrees, but not the edges of its counterpart.

In raw files, whose nodes get new numbers in the preparation, the features of papers show the class through noise, so
that features alone allow an accuracy of 0.6. Papers cite papers of their class more often than others, and popular
papers far more often; their authors, fields and venues mostly have their class too. The neighbours of a paper therefore
reveal its class better than its features.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rgat.graph import Graph, Relation, Schema
from benchmarks.rgat.raw import EDGES, FEATURES, FULL, LABELS, NODES, GraphSettings, published
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError

PIECE = 1 << 24
"""Targets, or edges, that are drawn at once."""

# Distance between the nodes of adjacent popularity ranks, as a fraction of all nodes. No small multiple of the golden
# ratio is close to an integer, so popular nodes are spread evenly.
GOLDEN = (math.sqrt(5) - 1) / 2


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
        skew: s, from 0 (all nodes equal) to less than 1.
    """
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
    """Return the first edge of each node, [nodes + 1], int64.

    Args:
        mean: mean number of edges per node.
        skew: 0 to less than 1; the expected number of edges is about proportional to (popularity rank) ** -skew.
    """
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
        skew: 0 to less than 1; the probability of a node is about proportional to (popularity rank) ** -skew.
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


def igbh_proportions(schema: Schema, papers: int) -> tuple[list[int], dict[str, float]]:
    """Return nodes of each type and mean edges per target by relation: IGBH-Full scaled to ``papers`` papers.

    Types and relations that IGBH does not have get a node or an edge per paper.
    """
    igbh = NODES[FULL]
    other = igbh["paper"]
    share = papers / other
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
        schema: types and relations; None for those of IGBH-Full.
    """
    schema = published(FULL).schema if schema is None else schema
    return synthetic_graph(schema, *igbh_proportions(schema, papers), seed, device, skew)


NODES_PER_PAPER = {
    "paper": 1.0,
    "author": 1.03,
    "institute": 1 / 400,
    "fos": 1 / 50,
    "journal": 1 / 400,
    "conference": 1 / 800,
}
"""Nodes of each type per paper. Rare types are more frequent than in IGBH-Full, as in IGBH's small sizes."""
SIGNAL = {"paper": 1.0, "author": 0.5, "institute": 0.0, "fos": 0.5, "journal": 0.5, "conference": 0.5}
"""How clearly features show the class, relative to papers, by type."""
HEADERLESS = ("paper", "author")
"""Types whose features and labels have no numpy header."""


@dataclass(frozen=True)
class LinkStatistics:
    """Edges of a relation.

    Attributes:
        mean: mean number of edges per source.
        homophily: fraction of edges whose target has the class of their source; the rest is uniform over other
            classes.
        skew: skew of the targets' popularity.
    """

    relation: str
    mean: float
    homophily: float
    skew: float
    dtype: str


LINKS = (
    LinkStatistics("paper__cites__paper", 13.0, 0.7, 0.6, "<i8"),
    LinkStatistics("paper__written_by__author", 2.7, 0.8, 0.4, "<i8"),
    LinkStatistics("author__affiliated_to__institute", 0.175, 0.3, 0.8, "<i4"),
    LinkStatistics("paper__topic__fos", 3.9, 0.6, 0.8, "<i8"),
    LinkStatistics("paper__published__journal", 0.3, 0.5, 0.8, "<i4"),
    LinkStatistics("paper__venue__conference", 0.3, 0.5, 0.8, "<i8"),
)
ALONE = 0.6
"""Accuracy of the best classifier that sees only a paper's features."""
TRAIN_SHARE = 0.6
"""Fraction of the labelled papers for training."""
_ROWS = 1 << 14  # rows of features that are drawn at once
_NUMBERS_PER_WORKER = 1 << 26


@dataclass(frozen=True)
class SyntheticCommunities(Options):
    """Options of ``generate``. Nodes of other types than papers are in proportion; the first papers are labelled."""

    papers: int = 20_000
    classes: Annotated[int, Option("number of classes of papers", least=2)] = 8
    feature_size: Annotated[int, Option("number of features per node", "--size")] = 128
    eval_share: Annotated[float, Option("fraction of the labelled papers for evaluation")] = 0.1
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes > min(self.feature_size, self.papers):
            raise ConfigError(
                f"--classes={self.classes}: at most --size={self.feature_size} and --papers={self.papers}"
            )
        try:
            settings = self.settings
        except ValueError as error:
            raise ConfigError(f"generate: {error}") from error
        for share in (settings.train_share, settings.eval_share):
            if int(self.labelled_papers * share) < 1:
                raise ConfigError(f"generate: a share of {share} of {self.labelled_papers} labelled papers has none")

    @property
    def labelled_papers(self) -> int:
        """Number of papers with a label: four of five."""
        return self.papers * 4 // 5

    @property
    def nodes(self) -> dict[str, int]:
        """Number of nodes of each type; at least one for each class."""
        return {name: max(self.classes, round(self.papers * share)) for name, share in NODES_PER_PAPER.items()}

    @property
    def settings(self) -> GraphSettings:
        """Settings for the preparation of the generated data."""
        relations = tuple(links.relation for links in LINKS)
        sizes = (self.feature_size, self.classes, self.labelled_papers, TRAIN_SHARE, self.eval_share)
        return GraphSettings(tuple(NODES_PER_PAPER), relations, "paper", *sizes)


def generate(raw_dir: Path, options: SyntheticCommunities = SyntheticCommunities(), workers: int = 1) -> str:
    """Write synthetic raw data, marked as synthetic, to ``raw_dir``, an empty or new folder; return a summary.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    with synthetic.generated(raw_dir) as folder:
        settings = asdict(options.settings)
        synthetic.mark(folder, {"kind": "communities", **asdict(options), "settings": settings})
        tasks = [functools.partial(_write_nodes, folder, options, name) for name in NODES_PER_PAPER]
        tasks += [functools.partial(_write_edges, folder, options, links) for links in LINKS]
        numbers = sum(options.nodes.values()) * options.feature_size
        processes = min(workers, 1 + numbers // _NUMBERS_PER_WORKER)
        counts = list(synthetic.drawn(operator.call, tasks, processes))
    names = (*NODES_PER_PAPER, *(links.relation for links in LINKS))
    return ", ".join(f"{count:,} {name}" for name, count in zip(names, counts, strict=True))


def signal(alone: float, classes: int) -> float:
    """Return the length of the classes' orthogonal embeddings with which the best classifier has accuracy ``alone``.

    In noise of deviation 1: P(z + s > the other classes' z) = integral of phi(z) Phi(z + s)^(classes - 1).
    """
    z = np.linspace(-8, 8, 1601)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    low, high = 0.0, 16.0
    for _ in range(50):
        middle = (low + high) / 2
        below = np.array([math.erfc(-(value + middle) / math.sqrt(2)) / 2 for value in z])
        low, high = (middle, high) if float(density @ below ** (classes - 1)) < alone else (low, middle)
    return high


def draw_edges(options: SyntheticCommunities, links: LinkStatistics) -> NDArray[np.int64]:
    """Return edges [E, 2], source and target, in random order. Citations have each paper's self-loop, as in IGBH."""
    relation, classes = Relation.parse(links.relation), options.classes
    generator = _generator(options, links.relation)
    count = options.nodes[relation.source]
    every = torch.arange(count)
    sources = every.repeat_interleave(draw_starts(count, links.mean, 0.0, generator).diff())
    strays = torch.rand(len(sources), generator=generator) >= links.homophily
    others = torch.randint(1, classes, (len(sources),), generator=generator)
    targets = draw_ends(options.nodes[relation.target], len(sources), links.skew, generator, classes)
    edges = torch.stack([sources, targets + (sources + strays * others) % classes], 1)
    if relation.symmetric:
        edges = torch.cat([edges, torch.stack([every, every], 1)])
    drawn: NDArray[np.int64] = edges[torch.randperm(len(edges), generator=generator)].numpy()
    return drawn


def _write_edges(raw_dir: Path, options: SyntheticCommunities, links: LinkStatistics) -> int:
    """Write the edges of a relation, and return their number."""
    edges = draw_edges(options, links)
    path = raw_dir / links.relation / EDGES
    path.parent.mkdir()
    np.save(path, edges.astype(links.dtype))
    return len(edges)


def _write_nodes(raw_dir: Path, options: SyntheticCommunities, node_type: str) -> int:
    """Write the features of a type, for papers also the labels, and return the number of nodes."""
    folder = raw_dir / node_type
    folder.mkdir()
    if node_type == "paper":
        labels = (np.arange(options.papers) % options.classes).astype("<f4")
        labels[options.labelled_papers :] = np.nan  # a placeholder, as in IGBH
        labels.tofile(folder / LABELS)
    nodes, embeddings = options.nodes[node_type], _embeddings(options) * SIGNAL[node_type]
    with open(folder / FEATURES, "wb") as file:
        if node_type not in HEADERLESS:
            described: dict[str, Any] = {"descr": "<f4", "fortran_order": False}
            np.lib.format.write_array_header_1_0(file, {**described, "shape": (nodes, options.feature_size)})
        generator = _generator(options, f"{node_type}/features")
        for own in torch.arange(nodes).split(_ROWS):
            noise = torch.randn((len(own), options.feature_size), generator=generator)
            file.write((noise + embeddings[own % options.classes]).numpy().data)
    return nodes


@functools.lru_cache(maxsize=1)
def _embeddings(options: SyntheticCommunities) -> Tensor:
    """Return orthogonal class embeddings, [classes, F]."""
    size = options.feature_size, options.classes
    basis, _ = torch.linalg.qr(torch.randn(size, generator=_generator(options, "embeddings"), dtype=torch.float64))
    return (basis.T * signal(ALONE, options.classes)).float()


def _generator(options: SyntheticCommunities, purpose: str) -> torch.Generator:
    """Return a random generator for one purpose."""
    digest = hashlib.sha256(f"{options.seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
