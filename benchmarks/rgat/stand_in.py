"""Synthetic graphs in IGBH's layout: papers, authors, institutes, fields, journals and conferences with communities.

Every node has a class. The features of papers show it through noise, so that features alone allow a chosen accuracy.
Papers cite papers of their class more often than others, and popular papers far more often; their authors, fields and
venues mostly have their class too. The neighbours of a paper therefore reveal its class better than its features.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.rgat.graph import Relation
from benchmarks.rgat.raw import EDGES, FEATURES, LABELS, GraphSettings
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
class Links:
    """Edges of a relation.

    Attributes:
        relation: name of the folder.
        certain: minimum number of edges of every source.
        mean: mean number of further edges per source.
        homophily: fraction of edges whose target has the class of their source; the rest is uniform over other
            classes.
        exponent: popularity of a target is rank ** -exponent.
        dtype: dtype of the file.
    """

    relation: str
    certain: int
    mean: float
    homophily: float
    exponent: float
    dtype: str


LINKS = (
    Links("paper__cites__paper", 2, 11.0, 0.7, 0.6, "<i8"),
    Links("paper__written_by__author", 1, 1.7, 0.8, 0.4, "<i8"),
    Links("author__affiliated_to__institute", 0, 0.175, 0.3, 0.8, "<i4"),
    Links("paper__topic__fos", 2, 1.9, 0.6, 0.8, "<i8"),
    Links("paper__published__journal", 0, 0.3, 0.5, 0.8, "<i4"),
    Links("paper__venue__conference", 0, 0.3, 0.5, 0.8, "<i8"),
)
_SPREAD = 1.5  # shape of the negative binomial distribution of further edges; smaller is wider
_SINGLE = ("author__affiliated_to__institute", "paper__published__journal", "paper__venue__conference")
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
class Plan:
    """A task: the features of a type (for papers also the labels), or the edges of a relation."""

    folder: Path
    request: Request
    node_type: str | None = None
    links: Links | None = None


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
        plans = [Plan(folder, request, node_type=name) for name in PER_PAPER]
        plans += [Plan(folder, request, links=_links(links, request)) for links in LINKS]
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


def classes_of(request: Request, node_type: str) -> NDArray[np.int32]:
    """Return the class of each node of a type; all classes are equally frequent."""
    every = np.arange(request.nodes[node_type], dtype=np.int32) % request.classes
    return _random(request, node_type, "classes").permutation(every)


def draw_edges(request: Request, links: Links) -> NDArray[np.int64]:
    """Return edges [E, 2], source and target, in random order. Citations have each paper's self-loop, as in IGBH."""
    relation = Relation.parse(links.relation)
    random = _random(request, links.relation)
    own, other = classes_of(request, relation.source), classes_of(request, relation.target)
    if links.relation in _SINGLE:
        counts = (random.random(len(own)) < links.mean).astype(np.int64)
    else:
        counts = links.certain + random.negative_binomial(_SPREAD, _SPREAD / (_SPREAD + links.mean), len(own))
    sources = np.repeat(np.arange(len(own)), counts)
    wanted = own[sources]
    strays = random.random(len(sources)) >= links.homophily
    wanted[strays] += random.integers(1, request.classes, strays.sum(), dtype=np.int32)
    wanted %= request.classes
    members = np.argsort(other, kind="stable")  # by class
    firsts = np.searchsorted(other[members], np.arange(request.classes + 1))
    ranks = np.arange(len(members)) - firsts[other[members]] + 1
    popularity = np.concatenate([[0.0], np.cumsum(ranks**-links.exponent)])
    low, high = popularity[firsts[wanted]], popularity[firsts[wanted + 1]]
    places = np.searchsorted(popularity, low + random.random(len(sources)) * (high - low), side="right") - 1
    targets = members[np.clip(places, firsts[wanted], firsts[wanted + 1] - 1)]
    edges = np.stack([sources, targets], axis=1)
    if relation.symmetric:
        edges = np.concatenate([edges, np.repeat(np.arange(len(own))[:, None], 2, axis=1)])
    return random.permutation(edges)


def _write(plan: Plan) -> int:
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
        labels = classes_of(plan.request, "paper").astype("<f4")
        labels[plan.request.labelled_papers :] = np.nan  # a placeholder, as in IGBH
        labels.tofile(folder / LABELS)
    return plan.request.nodes[plan.node_type]


def _write_features(request: Request, node_type: str, path: Path) -> None:
    classes = classes_of(request, node_type)
    embeddings = _embeddings(request) * np.float32(SIGNAL[node_type])
    with open(path, "wb") as file:
        if node_type not in HEADERLESS:
            described: dict[str, Any] = {"descr": "<f4", "fortran_order": False}
            shape = (len(classes), request.feature_size)
            np.lib.format.write_array_header_1_0(file, {**described, "shape": shape})
        random = _random(request, node_type, "features")
        for first in range(0, len(classes), _ROWS):
            own = classes[first : first + _ROWS]
            noise = random.standard_normal((len(own), request.feature_size), np.float32)
            file.write((noise + embeddings[own]).data)


@functools.lru_cache(maxsize=1)
def _embeddings(request: Request) -> NDArray[np.float32]:
    """Return orthogonal class embeddings, [classes, F]."""
    random = _random(request, "embeddings")
    basis, _ = np.linalg.qr(random.standard_normal((request.feature_size, request.classes)))
    return (basis.T * signal(request.alone, request.classes)).astype(np.float32)


def _links(links: Links, request: Request) -> Links:
    cites = Relation.parse(links.relation).symmetric
    return dataclasses.replace(links, homophily=request.homophily) if cites else links


def _random(request: Request, *names: str) -> np.random.Generator:
    """Return a random generator for one purpose."""
    return np.random.default_rng([request.seed, *"/".join(names).encode()])
