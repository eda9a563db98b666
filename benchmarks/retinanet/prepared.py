"""The prepared format: pictures in folders, their boxes in COCO's JSON, as the reference has it, and as columns.

- ``train/data/<ImageID>.jpg``, ``validation/data/<ImageID>.jpg``, the published bytes;
- ``train/labels/openimages-mlperf.json`` and the validation's;
- ``train/boxes/*.npy`` and the validation's: :class:`common.detection.annotations.Annotations`, and of every picture
  ``picture_bytes`` and ``picture_sha256``;
- ``manifest.json``.

A folder that the reference's script made has pictures and JSON alone, and is read too: the JSON at every start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data import manifest
from common.data.manifest import Manifest
from common.detection.annotations import Annotations, read_coco
from common.detection.columns import read_column
from common.errors import DataError

FORMAT = "openimages-coco/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=retinanet --raw-dir RAW --data-dir DATA"
SPLITS = {"train": "train", "eval": "validation"}
"""Our names of the splits, and those of the folders."""
LABELS = "labels/openimages-mlperf.json"
BOXES = "boxes"
BYTES, SHA256 = "picture_bytes.npy", "picture_sha256.npy"
COUNTS = ("train_samples", "eval_samples", "classes", "train_boxes", "eval_boxes")


@dataclass(frozen=True)
class Split:
    """Pictures of a split and their boxes.

    Attributes:
        folder: of the pictures.
        annotations: with names, of pictures in the order of training and evaluation; classes are 0, 1, 2 ...
        file_bytes: (P,) int64, sizes of the files; None where nobody noted them.
    """

    folder: Path
    annotations: Annotations
    file_bytes: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.annotations.picture_id)

    @property
    def names(self) -> NDArray[np.bytes_]:
        """(P,) names of the files."""
        assert self.annotations.picture_name is not None
        return self.annotations.picture_name

    def path(self, place: int) -> Path:
        """The file of picture ``place``."""
        return self.folder / self.names[place].decode()

    def read(self, place: int) -> bytes:
        """The encoded picture ``place``.

        Raises:
            DataError: it is missing, cannot be read, or has another size than when it was prepared.
        """
        path = self.path(place)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: the picture cannot be read: {error.strerror}; prepare the data anew") from error
        if self.file_bytes is not None and len(data) != self.file_bytes[place]:
            raise DataError(
                f"{path} has {len(data)} bytes where {self.file_bytes[place]} were prepared; prepare the data anew"
            )
        return data

    def check_size(self, place: int, width: int, height: int) -> None:
        """Raise :class:`DataError` unless picture ``place`` is of the size that its boxes are for, px."""
        expected = (int(self.annotations.picture_width[place]), int(self.annotations.picture_height[place]))
        if (width, height) != expected:
            raise DataError(
                f"{self.path(place)} is {width} x {height} px, its boxes are for {expected[0]} x {expected[1]}; "
                "prepare the data anew"
            )


@dataclass(frozen=True)
class Prepared:
    """A prepared folder; ``manifest`` is None where the reference's script made it."""

    root: Path
    manifest: Manifest | None

    @property
    def stand_in(self) -> bool:
        """Whether the data are generated."""
        return self.manifest is not None and self.manifest.stand_in

    def samples(self, split: str) -> int:
        """Pictures of ``split``, train or eval."""
        if self.manifest is not None:
            return self.manifest.counts[f"{split}_samples"]
        return len(self.split(split))

    def split(self, split: str) -> Split:
        """Pictures and boxes of ``split``, train or eval.

        Raises:
            DataError: a file is missing or damaged, or classes are not counted from 0.
        """
        folder = self.root / SPLITS[split]
        if self.manifest is None:
            annotations, file_bytes = read_coco(folder / LABELS, names=True), None
        else:
            counts = self.manifest.counts
            pictures, boxes = counts[f"{split}_samples"], counts[f"{split}_boxes"]
            annotations = Annotations.read(folder / BOXES, pictures, counts["classes"], boxes, names=True)
            file_bytes = read_column(folder / BOXES / BYTES, np.dtype(np.int64), (pictures,))
        _check_classes(folder / LABELS, annotations.class_id)
        return Split(folder / "data", annotations, file_bytes)


def open_prepared(root: Path) -> Prepared:
    """Find out what ``root`` holds.

    Raises:
        DataError: neither a prepared folder nor the reference's, or the manifest is missing beside columns, as where
            `prepare` was cut off, or not as it should be.
    """
    if is_the_references(root):
        return Prepared(root, None)
    return Prepared(root, manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS))


def is_the_references(root: Path) -> bool:
    """Return whether the reference's script made ``root``: it has labels, and neither a manifest nor columns."""
    folders = [root / folder for folder in SPLITS.values()]
    ours = (root / manifest.NAME).exists() or any((folder / BOXES).exists() for folder in folders)
    return not ours and all((folder / LABELS).is_file() for folder in folders)


def _check_classes(path: Path, class_id: NDArray[np.int64]) -> None:
    """Raise :class:`DataError` unless the ids of classes are 0, 1, 2 ..., which are channels of the network."""
    found = np.sort(class_id)
    if len(found) and np.array_equal(found, np.arange(len(found))):
        return
    if len(found) and np.array_equal(found, np.arange(1, len(found) + 1)):
        reason = "categories are counted from 1, as newer releases of FiftyOne do: subtract 1 from every category_id"
    else:
        reason = f"ids of categories are {_listed(found)}, not 0, 1, 2 ...: it is another data set"
    raise DataError(f"{path}: {reason}, or run '{PREPARE_COMMAND}'")


def _listed(ids: NDArray[np.int64]) -> str:
    return f"{ids[0]} to {ids[-1]}, {len(ids)} in all" if len(ids) else "missing"
