"""Prepared data: names of the files, random orders, opening by a run, and verification.

N nodes, F features per node, E edges, S seeds. Files, relative to the prepared folder:

- ``features/<type>.npy``: e4m3 bits as uint8, (N, F);
- ``graph/<relation>/indptr.npy``: int64 (targets + 1,); ``graph/<relation>/indices.npy``: int32 (E,);
- ``seeds/<split>.npy``: int32 (S,), in the order of the split; ``seeds/<split>_labels.npy``: int16 (S,).

Nodes of every type are numbered by a random permutation, in all files, so that equal ranges are equal work and no
range is a community.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.rgat.graph import Relation, Schema
from benchmarks.rgat.raw import GraphSettings
from common.data import manifest
from common.data.manifest import Manifest
from common.data.preparation import read_all
from common.errors import DataError
from common.formats import npy
from common.untrusted.strict_json import parse

FORMAT = "rgat-csc/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=rgat --raw-dir RAW --data-dir DATA"
FEATURES = "float8"
"""Dtype of the features in the manifest: e4m3. numpy has no such dtype, so files have the bits as uint8."""
SCALE = 1.0
"""Factor that was applied to the features before conversion."""
_MARKED = 1 << 10  # entries of each seed and label file that enter the hash
SPLITS = ("train", "eval")
PERMUTATION_SEED = 0
SPLIT_SEED = 42
"""Random seed of the split (mlcommons/training, rgat, split_seeds.py)."""
_BLOCK = 1 << 22  # numbers that are checked at once
_REMEDY = f"delete it and {manifest.NAME}, then run '{PREPARE_COMMAND}'"


def features_name(node_type: str) -> str:
    """Return the name of a type's features."""
    return f"features/{node_type}.npy"


def indptr_name(relation: Relation) -> str:
    """Return the name of the file with the first edge of each target, followed by the number of edges."""
    return f"graph/{relation}/indptr.npy"


def indices_name(relation: Relation) -> str:
    """Return the name of the file with the edges' sources."""
    return f"graph/{relation}/indices.npy"


def seeds_name(split: str) -> str:
    """Return the name of the file with the nodes of a split."""
    return f"seeds/{split}.npy"


def labels_name(split: str) -> str:
    """Return the name of the file with the classes of these nodes."""
    return f"seeds/{split}_labels.npy"


def prepared_files(schema: Schema) -> list[str]:
    """Return the names of all prepared files."""
    features = [features_name(name) for name in schema.types]
    graph = [name(relation) for relation in schema.relations for name in (indptr_name, indices_name)]
    return [*features, *graph, *(name(split) for split in SPLITS for name in (seeds_name, labels_name))]


def draw_permutations(nodes: Mapping[str, int]) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yield type and new number of each node, int32 [N]; one generator draws all types in the order of ``nodes``."""
    generator = torch.Generator().manual_seed(PERMUTATION_SEED)
    for name, count in nodes.items():
        yield name, torch.randperm(count, generator=generator, dtype=torch.int32).numpy()


def split_sizes(labelled: int, train_share: float, eval_share: float) -> dict[str, int]:
    """Return the number of seeds of ``train`` and ``eval``: these fractions of the labelled nodes, rounded down."""
    return {"train": int(labelled * train_share), "eval": int(labelled * eval_share)}


def split_seeds(labelled: int, train_share: float, eval_share: float) -> dict[str, NDArray[np.int64]]:
    """Return the raw node numbers of the seeds of ``train`` and ``eval``, in order.

    They are consecutive parts of one fixed permutation, train first, with these fractions of the labelled nodes.
    """
    every = torch.randperm(labelled, generator=torch.Generator().manual_seed(SPLIT_SEED)).numpy()
    sizes = split_sizes(labelled, train_share, eval_share)
    return {"train": every[: sizes["train"]], "eval": every[sizes["train"] : sizes["train"] + sizes["eval"]]}


@dataclass(frozen=True)
class Labelled:
    """Nodes and their classes: (n,) each."""

    nodes: NDArray[np.int32]
    labels: NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True)
class PreparedGraph:
    """A prepared data set; T types, R relations.

    Attributes:
        nodes: [T], nodes of each type.
        edges: [R], edges of each relation.
        labelled: number of labelled nodes from which the splits were drawn.
        seeds: number of seeds of each split.
    """

    folder: Path
    manifest: Manifest
    settings: GraphSettings
    schema: Schema
    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    labelled: int
    seeds: Mapping[str, int]

    def labelled_seeds(self, split: str) -> Labelled:
        """Return the seeds of a split in its order and their classes, memory-mapped."""
        return Labelled(*(npy.mapped(self.folder / name(split)) for name in (seeds_name, labels_name)))


def open_prepared(data_dir: Path) -> PreparedGraph:
    """Read the manifest and every file's header, and compare them.

    Raises:
        DataError: a file is missing, or has another size, dtype or shape than in the manifest, or the seeds come from
            another preparation.
    """
    found = manifest.read(data_dir, FORMAT, PREPARE_COMMAND, [f"{split}_samples" for split in SPLITS])
    prepared = _described(data_dir, found)
    schema, seeds = prepared.schema, prepared.seeds
    expected: list[tuple[str, str, tuple[int, ...]]] = [
        (features_name(name), "|u1", (count, prepared.settings.feature_size))
        for name, count in zip(schema.types, prepared.nodes, strict=True)
    ]
    for relation, target, count in zip(schema.relations, schema.targets, prepared.edges, strict=True):
        expected.append((indptr_name(relation), "<i8", (prepared.nodes[target] + 1,)))
        expected.append((indices_name(relation), "<i4", (count,)))
    for split in SPLITS:
        expected += [(seeds_name(split), "<i4", (seeds[split],)), (labels_name(split), "<i2", (seeds[split],))]
    for name, dtype, shape in expected:
        _compare(data_dir / name, dtype, shape)
    if seeds_mark(data_dir) != found.source.get("seeds"):
        raise DataError(
            f"{data_dir / seeds_name(SPLITS[0]).rpartition('/')[0]} holds seeds of another permutation or split than "
            f"{manifest.NAME} says; run '{PREPARE_COMMAND}' into an empty folder"
        )
    return prepared


def seeds_mark(data_dir: Path) -> str:
    """Return SHA-256 of the first seeds and labels of both splits, which identifies permutation and split."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for name in (seeds_name(split), labels_name(split)):
            digest.update(npy.mapped(data_dir / name)[:_MARKED].tobytes())
    return digest.hexdigest()


def _described(data_dir: Path, found: Manifest) -> PreparedGraph:
    try:
        values = parse(found.source["settings"])
        settings, features = GraphSettings.parse(values), values["features"]
        schema, counts = settings.schema, found.counts
        if features != FEATURES:
            raise ValueError(f"features={features}, where training reads {FEATURES}")
        return PreparedGraph(
            data_dir,
            found,
            settings,
            schema,
            tuple(counts[nodes_count(name)] for name in schema.types),
            tuple(counts[edges_count(str(relation))] for relation in schema.relations),
            counts["labelled"],
            {split: counts[f"{split}_samples"] for split in SPLITS},
        )
    except (KeyError, TypeError, ValueError) as error:
        path = data_dir / manifest.NAME
        raise DataError(f"{path} has no valid {error}; run '{PREPARE_COMMAND}' into an empty folder") from error


def nodes_count(node_type: str) -> str:
    """Return the manifest's key for the number of nodes of a type."""
    return f"{node_type}_nodes"


def edges_count(relation: str) -> str:
    """Return the manifest's key for the number of edges of a relation."""
    return f"{relation}_edges"


def _compare(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    try:
        header = npy.read_header(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} has no header of numpy's: {error}; run '{PREPARE_COMMAND}'") from error
    if (header.dtype.str, header.shape) != (dtype, shape) or (header.fortran_order and len(shape) > 1):
        raise DataError(
            f"{path} holds {header.dtype.str} {header.shape} where {manifest.NAME} says {dtype} {shape}; "
            f"run '{PREPARE_COMMAND}' into an empty folder"
        )


def verify(data_dir: Path, workers: int = 1) -> Manifest:
    """Check all checksums of ``data_dir``, then the graph and the seeds, ``workers`` files at a time.

    Raises:
        DataError: a file is missing or changed, or its content is impossible.
    """
    prepared = open_prepared(data_dir)
    manifest.verify(data_dir, FORMAT, PREPARE_COMMAND, workers)
    checks = [functools.partial(check_relation, prepared, number) for number in range(len(prepared.edges))]
    read_all(operator.call, [*checks, functools.partial(check_seeds, prepared)], workers, "check")
    return prepared.manifest


def check_relation(prepared: PreparedGraph, number: int) -> None:
    """Check that ``indptr`` of a relation ascends from 0 to the number of edges, and that all sources exist.

    Raises:
        DataError: the check failed.
    """
    relation = prepared.schema.relations[number]
    sources = prepared.nodes[prepared.schema.sources[number]]
    path = prepared.folder / indptr_name(relation)
    last = 0
    for first, block in _blocks(path):
        if first == 0 and block[0] != 0:
            raise DataError(f"{path} begins with {block[0]} and not with 0; {_REMEDY}")
        falls = np.flatnonzero(np.diff(block, prepend=last) < 0)
        if len(falls):
            raise DataError(f"{path} falls at {first + int(falls[0]):,}; {_REMEDY}")
        last = int(block[-1])
    if last != prepared.edges[number]:
        raise DataError(f"{path} ends at {last:,} and there are {prepared.edges[number]:,} edges; {_REMEDY}")
    _check_range(prepared.folder / indices_name(relation), sources)


def check_seeds(prepared: PreparedGraph) -> None:
    """Check that the seeds are those of the split, in its order, and that their labels are valid classes.

    This also proves that seeds are labelled and distinct. The permutation is drawn again for it.

    Raises:
        DataError: the check failed.
    """
    settings, papers = prepared.settings, prepared.nodes[prepared.schema.seed_type]
    for split in SPLITS:
        _check_range(prepared.folder / seeds_name(split), papers)
        _check_range(prepared.folder / labels_name(split), settings.classes)
    permutations = draw_permutations(dict(zip(settings.types, prepared.nodes, strict=True)))
    numbers = next(numbers for node_type, numbers in permutations if node_type == settings.seeds)
    for name, expected in split_seeds(prepared.labelled, settings.train_share, settings.eval_share).items():
        path = prepared.folder / seeds_name(name)
        for first, block in _blocks(path):
            if not np.array_equal(block, numbers[expected[first : first + len(block)]]):
                made, here = prepared.manifest.source.get("torch"), torch.__version__
                version = "" if made == here else f" by PyTorch {here}; they were prepared by {made}"
                raise DataError(
                    f"{path}: from {first:,} on, not the seeds that split and permutation draw{version}; {_REMEDY}"
                )


def _check_range(path: Path, count: int) -> None:
    for first, block in _blocks(path):
        if block.min() < 0 or block.max() >= count:
            row = int(np.flatnonzero((block < 0) | (block >= count))[0])
            raise DataError(f"{path} has {block[row]:,} at {first + row:,}, and there are {count:,}; {_REMEDY}")


def _blocks(path: Path) -> Iterator[tuple[int, NDArray[np.integer]]]:
    values = np.load(path, mmap_mode="r")
    for first in range(0, len(values), _BLOCK):
        yield first, np.array(values[first : first + _BLOCK])
