"""Synthetic graphs in IGBH's layout: papers, authors, institutes, fields, journals and conferences with communities.

Every node has a class: its number modulo the number of classes. The preparation gives nodes new numbers. The features
of papers show the class through noise, so that features alone allow a chosen accuracy. Papers cite papers of their
class more often than others, and popular papers far more often; their authors, fields and venues mostly have their
class too. The neighbours of a paper therefore reveal its class better than its features.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rgat.graph import Relation
from benchmarks.rgat.raw import EDGES, FEATURES, LABELS, GraphSettings
from benchmarks.rgat.synthetic import draw_ends, draw_starts
from common.data import stand_in
from common.errors import ConfigError

PER_PAPER = {
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
        relation: name of the folder.
        mean: mean number of edges per source.
        homophily: fraction of edges whose target has the class of their source; the rest is uniform over other
            classes.
        skew: skew of the targets' popularity.
        dtype: dtype of the file.
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
_ROWS = 1 << 14  # rows of features that are drawn at once
_NUMBERS_PER_WORKER = 1 << 26


@dataclass(frozen=True)
class Request:
    """Options of the generator.

    Attributes:
        papers: number of papers; determines the number of all other nodes.
        classes: classes of the papers.
        feature_size: features per node.
        alone: accuracy of the best classifier that sees only a paper's features.
        homophily: fraction of citations within a class.
        labelled: number of papers with a label, which are the first ones; None: 0.8 of all.
        train_share, eval_share: fractions of the labelled papers.
        seed: random seed.
    """

    papers: int = 20_000
    classes: int = 8
    feature_size: int = 128
    alone: float = 0.6
    homophily: float = 0.7
    labelled: int | None = None
    train_share: float = 0.6
    eval_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.classes <= min(self.feature_size, self.papers):
            raise ConfigError(
                f"--classes={self.classes}: 2 or more, at most --size={self.feature_size} and --papers={self.papers}"
            )
        if self.labelled is not None and not 1 <= self.labelled <= self.papers:
            raise ConfigError(f"--labelled={self.labelled}: 1 to {self.papers} papers")
        for name in ("alone", "homophily"):
            if not 1 / self.classes < getattr(self, name) < 1:
                raise ConfigError(f"--{name}={getattr(self, name)}: more than 1 / classes, less than 1")
        if self.seed < 0:
            raise ConfigError(f"--seed={self.seed}: 0 or more")
        try:
            settings = self.settings
        except ValueError as error:
            raise ConfigError(f"generate: {error}") from error
        for share in (settings.train_share, settings.eval_share):
            if int(self.labelled_papers * share) < 1:
                raise ConfigError(f"generate: a share of {share} of {self.labelled_papers} labelled papers has none")

    @property
    def labelled_papers(self) -> int:
        """Number of papers with a label."""
        return self.papers * 4 // 5 if self.labelled is None else self.labelled

    @property
    def nodes(self) -> dict[str, int]:
        """Number of nodes of each type; at least one for each class."""
        return {name: max(self.classes, round(self.papers * share)) for name, share in PER_PAPER.items()}

    @property
    def settings(self) -> GraphSettings:
        """GraphSettings for the preparation of the generated data."""
        relations = tuple(links.relation for links in LINKS)
        sizes = (self.feature_size, self.classes, self.labelled_papers, self.train_share, self.eval_share)
        return GraphSettings(tuple(PER_PAPER), relations, "paper", *sizes)


@dataclass(frozen=True)
class Generated:
    """Numbers of nodes and edges in the raw files."""

    nodes: dict[str, int]
    edges: dict[str, int]

    def __str__(self) -> str:
        parts = [f"{count:,} {name}" for name, count in (*self.nodes.items(), *self.edges.items())]
        return ", ".join(parts)


@dataclass(frozen=True)
class SyntheticFile:
    """A task: the features of a type (for papers also the labels), or the edges of a relation."""

    folder: Path
    request: Request
    node_type: str | None = None
    links: LinkStatistics | None = None


def generate(raw_dir: Path, request: Request, workers: int = 1) -> Generated:
    """Write synthetic raw data to ``raw_dir``, marked as synthetic.

    Args:
        raw_dir: an empty or new folder.
        workers: number of processes.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    stand_in.require_unused(raw_dir)
    with stand_in.generated(raw_dir) as folder:
        settings = asdict(request.settings)
        stand_in.mark(folder, {"kind": "communities", **asdict(request), "settings": settings})
        plans = [SyntheticFile(folder, request, node_type=name) for name in PER_PAPER]
        plans += [SyntheticFile(folder, request, links=_links(links, request)) for links in LINKS]
        nodes = request.nodes
        numbers = sum(nodes.values()) * request.feature_size
        processes = min(workers, 1 + numbers // _NUMBERS_PER_WORKER)
        counts = list(stand_in.drawn(_write, plans, processes))
    return Generated(nodes, {links.relation: count for links, count in zip(LINKS, counts[len(nodes) :], strict=True)})


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


def draw_edges(request: Request, links: LinkStatistics) -> NDArray[np.int64]:
    """Return edges [E, 2], source and target, in random order. Citations have each paper's self-loop, as in IGBH."""
    relation, classes = Relation.parse(links.relation), request.classes
    generator = _generator(request, links.relation)
    count = request.nodes[relation.source]
    every = torch.arange(count)
    sources = every.repeat_interleave(draw_starts(count, links.mean, 0.0, generator).diff())
    strays = torch.rand(len(sources), generator=generator) >= links.homophily
    others = torch.randint(1, classes, (len(sources),), generator=generator)
    targets = draw_ends(request.nodes[relation.target], len(sources), links.skew, generator, classes)
    edges = torch.stack([sources, targets + (sources + strays * others) % classes], 1)
    if relation.symmetric:
        edges = torch.cat([edges, torch.stack([every, every], 1)])
    drawn: NDArray[np.int64] = edges[torch.randperm(len(edges), generator=generator)].numpy()
    return drawn


def _write(plan: SyntheticFile) -> int:
    """Execute a plan, and return the number of rows."""
    if plan.links is not None:
        edges = draw_edges(plan.request, plan.links)
        path = plan.folder / plan.links.relation / EDGES
        path.parent.mkdir()
        np.save(path, edges.astype(plan.links.dtype))
        return len(edges)
    assert plan.node_type is not None
    folder = plan.folder / plan.node_type
    folder.mkdir()
    _write_features(plan.request, plan.node_type, folder / FEATURES)
    if plan.node_type == "paper":
        labels = (np.arange(plan.request.papers) % plan.request.classes).astype("<f4")
        labels[plan.request.labelled_papers :] = np.nan  # a placeholder, as in IGBH
        labels.tofile(folder / LABELS)
    return plan.request.nodes[plan.node_type]


def _write_features(request: Request, node_type: str, path: Path) -> None:
    nodes, embeddings = request.nodes[node_type], _embeddings(request) * SIGNAL[node_type]
    with open(path, "wb") as file:
        if node_type not in HEADERLESS:
            described: dict[str, Any] = {"descr": "<f4", "fortran_order": False}
            np.lib.format.write_array_header_1_0(file, {**described, "shape": (nodes, request.feature_size)})
        generator = _generator(request, f"{node_type}/features")
        for own in torch.arange(nodes).split(_ROWS):
            noise = torch.randn((len(own), request.feature_size), generator=generator)
            file.write((noise + embeddings[own % request.classes]).numpy().data)


@functools.lru_cache(maxsize=1)
def _embeddings(request: Request) -> Tensor:
    """Return orthogonal class embeddings, [classes, F]."""
    size = request.feature_size, request.classes
    basis, _ = torch.linalg.qr(torch.randn(size, generator=_generator(request, "embeddings"), dtype=torch.float64))
    return (basis.T * signal(request.alone, request.classes)).float()


def _links(links: LinkStatistics, request: Request) -> LinkStatistics:
    cites = Relation.parse(links.relation).symmetric
    return dataclasses.replace(links, homophily=request.homophily) if cites else links


def _generator(request: Request, purpose: str) -> torch.Generator:
    """Return a random generator for one purpose."""
    digest = hashlib.sha256(f"{request.seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
