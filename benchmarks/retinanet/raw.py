"""OpenImages in its published layout: tables of boxes and classes, and folders of pictures.

- ``oidv6-train-annotations-bbox.csv``, ``validation-annotations-bbox.csv``: one box per row, as fractions of the
  picture;
- ``class-descriptions-boxable.csv``: labels such as ``/m/01g317``, and class names;
- ``train/<ImageID>.jpg``, ``validation/<ImageID>.jpg``;
- initial weights of the backbone: torchvision's ``resnext50_32x4d-7cdf4587.pth``, or ``backbone.pth`` of synthetic
  data.

The benchmark uses the pictures that have a box of one of its classes, sorted by id, and their boxes of these classes.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import compute
from pyarrow import csv as arrow_csv

from common.data.manifest import digest
from common.data.synthetic import MARKER, description_of
from common.errors import DataError
from common.untrusted.regular_file import read_text

SPLITS = {"train": "oidv6-train-annotations-bbox.csv", "validation": "validation-annotations-bbox.csv"}
"""Name of a split, which is also the name of its picture folder, to its table of boxes."""
CLASSES = "class-descriptions-boxable.csv"
BACKBONES = ("resnext50_32x4d-7cdf4587.pth", "backbone.pth")
"""File names of the backbone's initial weights: torchvision's, and that of synthetic data."""
FLAGS = ("IsOccluded", "IsTruncated", "IsGroupOf", "IsDepiction", "IsInside")
"""Flag columns of a box. -1 means unknown; like the reference, we read it as 1."""
EDGES = ("XMin", "XMax", "YMin", "YMax")
_ID = re.compile(r"[0-9A-Za-z_-]+")
_NAMED = 3  # maximum number of pictures that an error message lists


@functools.cache
def class_names() -> tuple[str, ...]:
    """Return the names of all classes of OpenImages-MLPerf, in the order of their ids.

    They are the leaf classes of OpenImages' hierarchy with at least 1,000 boxes, in the order of the reference's list.
    The index in this list, from 0, is the class id.
    """
    return tuple(Path(__file__).with_name("classes.txt").read_text(encoding="utf-8").splitlines())


@dataclass(frozen=True)
class RawBoxes:
    """The selected pictures of a split (P) and their boxes (N), sorted by picture and then in the order of the table.

    Attributes:
        picture: P ids, sorted.
        box_picture: (N,) index of the box's picture in ``picture``.
        box_class: (N,) index of the box's class in the list of classes.
        edges: (N, 4) XMin, XMax, YMin, YMax as fractions of the picture's width and height.
        flags: (N, 5), in the order of ``FLAGS``.
    """

    picture: list[str]
    box_picture: NDArray[np.int64]
    box_class: NDArray[np.int64]
    edges: NDArray[np.float64]
    flags: NDArray[np.bool_]


@dataclass(frozen=True)
class RawData:
    """A raw folder.

    Attributes:
        classes: class names, in the order of the benchmark.
        labels: label of each class in the tables.
        synthetic: description of synthetic data; None for OpenImages.
    """

    folder: Path
    classes: tuple[str, ...]
    labels: tuple[str, ...]
    synthetic: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Return the SHA-256 over classes and tables, which determine pictures and boxes. Reads the tables."""
        lines = [*self.classes, *self.labels, *(digest(self.folder / name, "sha256") for name in SPLITS.values())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def boxes(self, split: str) -> RawBoxes:
        """Return the selected pictures and boxes of a split; see :func:`read_boxes`."""
        return read_boxes(self.folder / SPLITS[split], self.labels)

    def require_pictures(self, split: str, ids: list[str]) -> None:
        """Raise :class:`DataError` if picture files are missing."""
        folder = self.folder / split
        existing = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        missing = [name for name in map(picture_name, ids) if name not in existing]
        if missing:
            raise DataError(
                f"{folder} lacks {len(missing)} of {len(ids)} pictures, such as {', '.join(missing[:_NAMED])}; "
                "'mlperf-suite download benchmark=retinanet' fetches those that are not there"
            )

    @property
    def backbone(self) -> Path | None:
        """File with the initial weights of the backbone, or None."""
        return next((self.folder / name for name in BACKBONES if (self.folder / name).is_file()), None)


def picture_name(picture: str) -> str:
    """Return the file name of the picture with id ``picture``."""
    return f"{picture}.jpg"


def open_raw(raw_dir: Path) -> RawData:
    """Open ``raw_dir``, without reading boxes.

    Raises:
        DataError: the folder or a table is missing, a table lacks a class, or ``SYNTHETIC`` is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; download OpenImages there or generate synthetic data")
    for name in (CLASSES, *SPLITS.values()):
        if not (raw_dir / name).is_file():
            raise DataError(f"{raw_dir / name} is missing; 'mlperf-suite download benchmark=retinanet' fetches it")
    synthetic = description_of(raw_dir)
    classes = class_names() if synthetic is None else class_names()[: _classes_of(raw_dir, synthetic)]
    return RawData(raw_dir, classes, _labels_of(raw_dir / CLASSES, classes), synthetic)


def _classes_of(raw_dir: Path, synthetic: dict[str, Any]) -> int:
    count = synthetic.get("classes")
    if type(count) is not int or not 1 <= count <= len(class_names()):
        raise DataError(
            f"{raw_dir / MARKER}: 'classes' is {count!r}, but must be how many of the {len(class_names())} classes, "
            "the first ones, the data have"
        )
    return count


def _labels_of(path: Path, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of ``classes`` in the table ``path``."""
    label_of: dict[str, str] = {}
    rows = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        for row in rows:
            if len(row) != 2 or label_of.setdefault(row[1], row[0]) != row[0]:
                raise DataError(
                    f"{path}, line {rows.line_num}: the row {row} is no label and name of a class, or the name came "
                    "before"
                )
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: cannot be read as a table: {error}") from error
    if missing := [name for name in classes if name not in label_of]:
        raise DataError(f"{path} has no class {missing[0]!r}, which the benchmark has; fetch the file again")
    return tuple(label_of[name] for name in classes)


def read_boxes(path: Path, labels: tuple[str, ...]) -> RawBoxes:
    """Read the boxes of ``labels``, and their pictures, from a table of OpenImages.

    Raises:
        DataError: the file is not such a table, a box has invalid edges, an id cannot be a file name, or no box has
            one of the labels. The message names the row.
    """
    table = _read_table(path, labels)
    edges_N4 = np.stack([table[name].to_numpy() for name in EDGES], axis=1)
    rows = table["row"].to_numpy()
    size_N2 = edges_N4[:, 1::2] - edges_N4[:, ::2]
    wrong = np.any(~np.isfinite(edges_N4) | (edges_N4 < 0), axis=1) | np.any(size_N2 < 0, axis=1)
    if wrong.any():
        first = int(wrong.argmax())
        edges = ", ".join(f"{name} {value:g}" for name, value in zip(EDGES, edges_N4[first].tolist(), strict=True))
        raise DataError(
            f"{path}, line {rows[first]}: a box with {edges}; shares of the picture are finite, not negative, and "
            "no minimum lies above its maximum; fetch the file again"
        )
    encoded = compute.dictionary_encode(table["ImageID"].combine_chunks())
    ids = encoded.dictionary.to_pylist()
    if invalid := next((name for name in ids if not _ID.fullmatch(name)), None):
        raise DataError(f"{path}: {invalid!r} is no id of a picture; fetch the file again")
    by_name = sorted(range(len(ids)), key=ids.__getitem__)
    rank = np.empty(len(ids), np.int64)
    rank[by_name] = np.arange(len(ids))
    box_picture = rank[encoded.indices.to_numpy()]
    order = np.argsort(box_picture, kind="stable")
    flags_N5 = np.stack([table[name].to_numpy() != 0 for name in FLAGS], axis=1)
    return RawBoxes(
        [ids[number] for number in by_name],
        box_picture[order],
        table["class"].to_numpy().astype(np.int64)[order],
        edges_N4[order],
        flags_N5[order],
    )


def _read_table(path: Path, labels: tuple[str, ...]) -> pyarrow.Table:
    """Read the rows of ``labels``. Column ``class`` is the index of the label, ``row`` the line number in the file."""
    types = {"ImageID": pyarrow.string(), "LabelName": pyarrow.string()}
    types |= {name: pyarrow.float64() for name in EDGES} | {name: pyarrow.int8() for name in FLAGS}
    # with no null values, a missing or invalid number is an error
    options = arrow_csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=[])
    try:
        try:
            table = arrow_csv.read_csv(path, convert_options=options)
        except pyarrow.ArrowInvalid:  # only the reader with one thread reports the number of the row
            table = arrow_csv.read_csv(path, arrow_csv.ReadOptions(use_threads=False), convert_options=options)
    except (OSError, pyarrow.ArrowInvalid, KeyError) as error:
        raise DataError(f"{path}: cannot be read as OpenImages' boxes: {error}; fetch the file again") from error
    table = table.append_column("row", pyarrow.array(np.arange(2, len(table) + 2)))
    table = table.append_column("class", compute.index_in(table["LabelName"], pyarrow.array(labels)))
    table = table.filter(compute.is_valid(table["class"]))
    if not len(table):
        raise DataError(f"{path} has no box of the benchmark's {len(labels)} classes")
    return table
