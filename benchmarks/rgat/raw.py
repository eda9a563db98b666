"""IGBH as published: features and labels of nodes, and edges, in one folder per type and relation.

- ``<type>/node_feat.npy``: float32 (N, F);
- ``paper/node_label_2K.npy``: (N,), float32, or with a header also integers or float64; the first papers have labels;
- ``<relation>/edge_index.npy``: integers (E, 2), source and target; :class:`Relation` defines the name.

In the sizes ``large`` and ``full``, the features of papers and authors and the labels are raw float32 without numpy's
header, although their names end in ``.npy``. The first bytes of a file show which kind it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.rgat.graph import LARGEST, Relation, Schema
from common.data.raw_layout import find_file
from common.data.synthetic import MARKER, description_of, marker_of
from common.errors import ConfigError, DataError
from common.formats import npy
from common.mlperf.fixed import benchmark_settings

FEATURES, LABELS, EDGES = "node_feat.npy", "node_label_2K.npy", "edge_index.npy"
FULL = "full"
NODES: dict[str, dict[str, int]] = {
    "full": {
        "paper": 269_346_174,
        "author": 277_220_883,
        "institute": 26_918,
        "fos": 712_960,
        "journal": 49_052,
        "conference": 4_547,
    },
    "large": {
        "paper": 100_000_000,
        "author": 116_959_896,
        "institute": 26_524,
        "fos": 649_707,
        "journal": 48_820,
        "conference": 4_490,
    },
    "medium": {"paper": 10_000_000, "author": 15_544_654, "institute": 23_256, "fos": 415_054},
    "small": {"paper": 1_000_000, "author": 1_926_066, "institute": 14_751, "fos": 190_449},
    "tiny": {"paper": 100_000, "author": 357_041, "institute": 8_738, "fos": 84_220},
}
"""Nodes of every published size, for the types that the benchmark's reference reads."""
_LABEL_DTYPES = ("<f4", "<f8", "<i8", "<i4", "<i2")  # files of the small sizes have a header with the dtype
_EDGE_DTYPES = ("<i8", "<i4", "<u4", "<u8")
_MOST_CLASSES = 1 << 15  # labels are int16
_END_BYTES = 1 << 16  # bytes at each end of a file that enter the fingerprint
_DOWNLOAD = "'mlperf-suite download benchmark=rgat' fetches it"


@dataclass(frozen=True)
class GraphSettings:
    """Contents of raw data.

    Attributes:
        types: node types, in the order in which their permutations are drawn.
        relations: stored relations, by the names of their folders.
        seeds: node type that is classified.
        feature_size: F, features per node.
        classes: number of classes of the seeds.
        labelled: number of seeds with a label, which are the first ones; None: all.
        train_share, eval_share: fractions of the labelled seeds.
    """

    types: tuple[str, ...]
    relations: tuple[str, ...]
    seeds: str
    feature_size: int
    classes: int
    labelled: int | None
    train_share: float
    eval_share: float

    def __post_init__(self) -> None:
        schema = self.schema
        if not min(self.feature_size, self.classes, 1 if self.labelled is None else self.labelled) >= 1:
            raise ValueError("feature_size, classes and labelled are 1 or more")
        if self.classes > _MOST_CLASSES:
            raise ValueError(f"classes={self.classes}: at most {_MOST_CLASSES}")
        if not (self.train_share > 0 and self.eval_share > 0 and self.train_share + self.eval_share <= 1):
            raise ValueError(
                f"train_share={self.train_share} and eval_share={self.eval_share} are no shares of one set"
            )
        if len({*schema.sources, *schema.targets}) < len(self.types):
            raise ValueError("a type has no edges")

    @property
    def schema(self) -> Schema:
        """Types, and relations after augmentation."""
        return Schema.augmented(self.types, self.relations, self.seeds)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> GraphSettings:
        """Return settings from parsed JSON or YAML.

        Raises:
            KeyError, TypeError, ValueError: a value is missing or has the wrong type.
        """
        labelled = values["labelled"]
        return cls(
            tuple(str(name) for name in values["types"]),
            tuple(str(name) for name in values["relations"]),
            str(values["seeds"]),
            int(values["feature_size"]),
            int(values["classes"]),
            None if labelled is None else int(labelled),
            float(values["train_share"]),
            float(values["eval_share"]),
        )


@dataclass(frozen=True)
class RawArray:
    """An array in a file, with or without numpy's header.

    Attributes:
        offset: bytes before the values.
        rows, width: shape of the array; labels have width 1.
        by_columns: whether the array is stored in Fortran order.
    """

    path: Path
    offset: int
    dtype: np.dtype[Any]
    rows: int
    width: int
    by_columns: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.width * self.dtype.itemsize

    def read(self, first: int, last: int) -> NDArray[Any]:
        """Return rows ``first`` to ``last`` (exclusive), [last - first, width].

        Raises:
            DataError: the file has become shorter.
        """
        if not self.by_columns:
            return self._values(first * self.width, (last - first) * self.width).reshape(-1, self.width)
        columns = [self._values(column * self.rows + first, last - first) for column in range(self.width)]
        return np.stack(columns, axis=1)

    def _values(self, first: int, count: int) -> NDArray[Any]:
        offset = self.offset + first * self.dtype.itemsize
        found: NDArray[Any] = np.fromfile(self.path, self.dtype, count, offset=offset)
        if len(found) < count:
            raise DataError(f"{self.path} ends {count - len(found):,} values too early; {_DOWNLOAD}")
        return found


@dataclass(frozen=True)
class RawGraph:
    """A raw folder.

    Attributes:
        name: name of the published size, or ``synthetic``.
        synthetic: description of synthetic data; None for IGBH.
        features, edges: arrays by node type and by stored relation.
        labels: labels of the seeds' type.
    """

    folder: Path
    name: str
    synthetic: dict[str, Any] | None
    settings: GraphSettings
    features: dict[str, RawArray]
    labels: RawArray
    edges: dict[str, RawArray]

    @property
    def nodes(self) -> dict[str, int]:
        """Number of nodes of each type."""
        return {name: array.rows for name, array in self.features.items()}

    @property
    def labelled(self) -> int:
        """Number of seeds with a label; they are the first ones."""
        return self.labels.rows if self.settings.labelled is None else self.settings.labelled

    def fingerprint(self) -> str:
        """Return SHA-256 of the description, and of size and both ends of every file; reads 128 KiB per file."""
        digest = hashlib.sha256(json.dumps(self.synthetic, sort_keys=True).encode())
        for array in (*self.features.values(), self.labels, *self.edges.values()):
            size = array.path.stat().st_size
            digest.update(f"{array.path.relative_to(self.folder)}\t{size}\n".encode())
            with open(array.path, "rb") as file:
                digest.update(file.read(_END_BYTES))
                file.seek(max(0, size - _END_BYTES))
                digest.update(file.read())
        return digest.hexdigest()


def published(size: str) -> GraphSettings:
    """Return the settings of IGBH in one of its sizes, from the benchmark's constants."""
    facts = benchmark_settings("rgat")["facts"]
    types = [name for name in facts["node_types"] if name in NODES[size]]
    return GraphSettings.parse(
        {
            **facts,
            "types": types,
            "relations": [text for text in facts["relations"] if _joins(text, types)],
            "labelled": facts["labelled"] if size == FULL else None,
        }
    )


def open_raw(raw_dir: Path, size: str | None = None) -> RawGraph:
    """Open ``raw_dir``; reads only headers and sizes.

    Args:
        raw_dir: folder with the types and relations, or a parent of it, such as that of ``full/processed``.
        size: size of IGBH, a name in ``NODES``; None: determined from the number of papers.

    Raises:
        ConfigError: a size is given for synthetic data.
        DataError: the folder or a file is missing, a file has the wrong type or number of rows, or ``SYNTHETIC`` is
            damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; download IGBH or generate synthetic data there")
    papers = f"{benchmark_settings('rgat')['facts']['seeds']}/{FEATURES}"
    found = find_file(raw_dir, papers)
    if found is None:
        raise DataError(f"neither {raw_dir} nor a folder below it holds {papers}; {_DOWNLOAD}")
    folder, marker = found.parent.parent, marker_of(raw_dir, found)
    if marker is not None:
        if size is not None:
            raise ConfigError(f"--size={size}: {folder} holds synthetic data, which the file {MARKER} describes")
        synthetic = description_of(marker.parent)
        assert synthetic is not None
        return _opened(folder, "synthetic", synthetic, _settings(marker, synthetic), None)
    name = size or _size_of(folder)
    return _opened(folder, f"IGBH-{name}", None, published(name), NODES[name])


def open_array(
    path: Path, dtypes: Sequence[str], width: int | None, rows: int | None = None, headerless: bool = False
) -> RawArray:
    """Return the array in ``path``; its first bytes show whether it has a header.

    Args:
        dtypes: allowed dtypes; the first is the dtype of a file without header.
        width: numbers per row; None for an array of one dimension.
        rows: required number of rows; None: any.
        headerless: whether numpy's header may be missing.

    Raises:
        DataError: the file is missing, has another dtype or shape, or its length does not match its rows.
    """
    row_shape = () if width is None else (width,)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            has_header = file.read(len(npy.MAGIC)) == npy.MAGIC
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {_DOWNLOAD}") from error
    if has_header:
        array = _with_header(path, dtypes, row_shape, size)
    elif headerless:
        dtype = np.dtype(dtypes[0])
        row_bytes = dtype.itemsize * math.prod(row_shape)
        count, rest = divmod(size, row_bytes)
        if rest:
            raise DataError(
                f"{path} has no numpy header and {size:,} bytes, no whole number of rows of {row_bytes:,} bytes "
                f"({dtype.name} {row_shape}): it was cut off or is of another width; {_DOWNLOAD}"
            )
        array = RawArray(path, 0, dtype, count, width or 1)
    else:
        raise DataError(f"{path} does not begin with numpy's header; {_DOWNLOAD}")
    if rows is not None and array.rows != rows:
        raise DataError(f"{path} has {array.rows:,} rows and not {rows:,}; {_DOWNLOAD}")
    return array


def _with_header(path: Path, dtypes: Sequence[str], row_shape: tuple[int, ...], size: int) -> RawArray:
    try:
        header = npy.read_header(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} has a damaged numpy header: {error}; {_DOWNLOAD}") from error
    if header.dtype not in [np.dtype(name) for name in dtypes]:
        raise DataError(f"{path} holds {header.dtype.str} where {' or '.join(dtypes)} is expected")
    if len(header.shape) != 1 + len(row_shape) or header.shape[1:] != row_shape:
        expected = ", ".join(["rows", *map(str, row_shape)])
        raise DataError(f"{path} holds an array {header.shape} where ({expected}) is expected")
    needed = header.offset + math.prod(header.shape) * header.dtype.itemsize
    if size != needed:
        raise DataError(f"{path} has {size:,} bytes where its header says {needed:,}: it was cut off; {_DOWNLOAD}")
    by_columns = header.fortran_order and len(row_shape) == 1
    return RawArray(path, header.offset, header.dtype, header.shape[0], math.prod(row_shape), by_columns)


def _opened(
    folder: Path, name: str, synthetic: dict[str, Any] | None, settings: GraphSettings, nodes: Mapping[str, int] | None
) -> RawGraph:
    features = {
        kind: open_array(
            folder / kind / FEATURES,
            ("<f4",),
            settings.feature_size,
            None if nodes is None else nodes[kind],
            headerless=True,
        )
        for kind in settings.types
    }
    for array in features.values():
        if not 1 <= array.rows <= LARGEST:
            raise DataError(f"{array.path} has {array.rows:,} rows; a type has 1 to {LARGEST:,} nodes")
    seeds = features[settings.seeds].rows
    labels = open_array(folder / settings.seeds / LABELS, _LABEL_DTYPES, None, seeds, headerless=True)
    if settings.labelled is not None and settings.labelled > seeds:
        raise DataError(f"{folder}: {settings.labelled:,} of {seeds:,} nodes of type {settings.seeds} have a label")
    edges = {text: open_array(folder / text / EDGES, _EDGE_DTYPES, 2) for text in settings.relations}
    return RawGraph(folder, name, synthetic, settings, features, labels, edges)


def _size_of(folder: Path) -> str:
    """Return the published size with the same number of papers as a folder."""
    facts = benchmark_settings("rgat")["facts"]
    papers = open_array(folder / facts["seeds"] / FEATURES, ("<f4",), facts["feature_size"], headerless=True)
    for name, nodes in NODES.items():
        if nodes[facts["seeds"]] == papers.rows:
            return name
    known = ", ".join(f"{nodes[facts['seeds']]:,} ({name})" for name, nodes in NODES.items())
    raise DataError(
        f"{papers.path} has {papers.rows:,} rows and IGBH's sizes {known}: fetch it again, or, for other data, put a "
        f"file {MARKER} into the folder that says what they are"
    )


def _settings(marker: Path, synthetic: Mapping[str, Any]) -> GraphSettings:
    try:
        return GraphSettings.parse(synthetic["settings"])
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(GraphSettings))
        raise DataError(f"{marker} has missing or invalid settings ({names}): {error}") from error


def _joins(text: str, types: Sequence[str]) -> bool:
    relation = Relation.parse(text)
    return relation.source in types and relation.target in types
