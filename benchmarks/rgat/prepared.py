"""Prepared data as a run opens them; every file's header is compared with the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.rgat.graph import Schema
from benchmarks.rgat.prepared_names import SPLITS, features_name, indices_name, indptr_name, labels_name, seeds_name
from benchmarks.rgat.raw import Settings
from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError
from common.formats import npy
from common.untrusted.strict_json import parse

FORMAT = "rgat-csc/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=rgat --raw-dir RAW --data-dir DATA"
FEATURE_DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float8": (torch.float8_e4m3fn, "|u1"),
    "float16": (torch.float16, "<f2"),
    "float32": (torch.float32, "<f4"),
}
"""Feature dtype by name: in PyTorch and in the file. numpy has no float8, so its bits are stored as bytes."""
SCALE = 1.0
"""Factor that was applied to the features before conversion."""
_MARKED = 1 << 10  # entries of each seed and label file that enter the hash


@dataclass(frozen=True)
class Prepared:
    """A prepared data set; T types, R relations.

    Attributes:
        settings: settings of the preparation.
        features: dtype of the features, a name in ``FEATURE_DTYPES``.
        nodes: [T], nodes of each type.
        edges: [R], edges of each relation.
        labelled: number of labelled nodes from which the splits were drawn.
        seeds: number of seeds of each split.
    """

    folder: Path
    manifest: Manifest
    settings: Settings
    schema: Schema
    features: str
    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    labelled: int
    seeds: Mapping[str, int]

    @property
    def stand_in(self) -> bool:
        """Whether the data are synthetic."""
        return self.manifest.stand_in

    @property
    def feature_size(self) -> int:
        """F, features per node."""
        return self.settings.feature_size

    @property
    def feature_dtype(self) -> torch.dtype:
        """PyTorch dtype of the features."""
        return FEATURE_DTYPES[self.features][0]

    def seeds_of(self, split: str) -> NDArray[np.int32]:
        """Return the nodes of a split in its order, memory-mapped."""
        return _mapped(self.folder / seeds_name(split))

    def labels_of(self, split: str) -> NDArray[np.int16]:
        """Return the classes of a split's seeds, memory-mapped."""
        return _mapped(self.folder / labels_name(split))


def open_prepared(data_dir: Path) -> Prepared:
    """Read the manifest and every file's header, and compare them.

    Raises:
        DataError: a file is missing, or has another size, dtype or shape than in the manifest, or the seeds come from
            another preparation.
    """
    found = manifest.read(data_dir, FORMAT, PREPARE_COMMAND, [f"{split}_samples" for split in SPLITS])
    prepared = _described(data_dir, found)
    schema, seeds = prepared.schema, prepared.seeds
    expected: list[tuple[str, str, tuple[int, ...]]] = [
        (features_name(name), FEATURE_DTYPES[prepared.features][1], (count, prepared.feature_size))
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
            digest.update(_mapped(data_dir / name)[:_MARKED].tobytes())
    return digest.hexdigest()


def _described(data_dir: Path, found: Manifest) -> Prepared:
    try:
        values = parse(found.source["settings"])
        settings, features = Settings.parse(values), str(values["features"])
        schema, counts = settings.schema, found.counts
        if features not in FEATURE_DTYPES:
            raise ValueError(f"features={features}")
        return Prepared(
            data_dir,
            found,
            settings,
            schema,
            features,
            tuple(counts[nodes_count(name)] for name in schema.types),
            tuple(counts[edges_count(str(relation))] for relation in schema.relations),
            counts["labelled"],
            {split: counts[f"{split}_samples"] for split in SPLITS},
        )
    except (KeyError, TypeError, ValueError) as error:
        path = data_dir / manifest.NAME
        raise DataError(f"{path} lacks or garbles {error}; run '{PREPARE_COMMAND}' into an empty folder") from error


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
    if (header.dtype.str, header.shape, header.fortran_order) != (
        dtype,
        shape,
        header.fortran_order and len(shape) < 2,
    ):
        raise DataError(
            f"{path} holds {header.dtype.str} {header.shape} where {manifest.NAME} says {dtype} {shape}; "
            f"run '{PREPARE_COMMAND}' into an empty folder"
        )


def _mapped(path: Path) -> NDArray[Any]:
    return npy.mapped(path)
