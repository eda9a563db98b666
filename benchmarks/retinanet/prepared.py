"""The prepared format: pictures in folders, and their boxes as COCO JSON, like the reference's, and as columns.

- ``train/data/<ImageID>.jpg``, ``validation/data/<ImageID>.jpg``: the published bytes;
- ``{train,validation}/labels/openimages-mlperf.json``;
- ``{train,validation}/boxes/*.npy``: :class:`common.detection.annotations.Annotations`, and ``picture_bytes`` and
  ``picture_sha256`` of every picture;
- ``manifest.json``.

Folders of the reference's script, which have only pictures and JSON, can be read too. Their JSON is parsed at every
start.
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
from common.formats.recordio import ImageRecord
from common.vision.pictures import Pictures

FORMAT = "openimages-coco/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=retinanet --raw-dir RAW --data-dir DATA"
SPLITS = {"train": "train", "eval": "validation"}
"""Our names of the splits to the names of their folders."""
LABELS = "labels/openimages-mlperf.json"
BOXES = "boxes"
BYTES, SHA256 = "picture_bytes.npy", "picture_sha256.npy"
COUNTS = ("train_samples", "eval_samples", "classes", "train_boxes", "eval_boxes")


@dataclass(frozen=True)
class Split(Pictures):
    """Pictures of a split and their boxes.

    Attributes:
        path: folder of the pictures.
        annotations: boxes and file names. Pictures are in the order of training and evaluation; classes are 0, 1, 2
            ...
        file_bytes: (P,) file sizes, or None if the data have no such column.
    """

    path: Path
    annotations: Annotations
    file_bytes: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.annotations.picture_id)

    @property
    def names(self) -> NDArray[np.bytes_]:
        """File names (P,)."""
        assert self.annotations.picture_name is not None
        return self.annotations.picture_name

    def describe(self, index: int) -> str:
        """Return the path of the picture with this index."""
        return f"{self.path / self.names[index].decode()}"

    def size(self, index: int) -> tuple[int, int]:
        """Return the width and height in px for which the boxes of a picture are given."""
        return int(self.annotations.picture_width[index]), int(self.annotations.picture_height[index])

    def record(self, index: int) -> ImageRecord:
        """Return the encoded picture with this index.

        Raises:
            DataError: the file is missing, unreadable, or has another size than during preparation.
        """
        path = Path(self.describe(index))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: the picture cannot be read: {error.strerror}; prepare the data anew") from error
        if self.file_bytes is not None and len(data) != self.file_bytes[index]:
            raise DataError(
                f"{path} has {len(data)} bytes where {self.file_bytes[index]} were prepared; prepare the data anew"
            )
        return ImageRecord(index, (), data)


@dataclass(frozen=True)
class Prepared:
    """A prepared folder. ``manifest`` is None if the reference's script wrote the folder."""

    root: Path
    manifest: Manifest | None

    @property
    def synthetic(self) -> bool:
        """Whether the data are synthetic."""
        return self.manifest is not None and self.manifest.synthetic

    def samples(self, split: str) -> int:
        """Return the number of pictures of ``split``, which is train or eval."""
        if self.manifest is not None:
            return self.manifest.counts[f"{split}_samples"]
        return len(self.split(split))

    def split(self, split: str) -> Split:
        """Return pictures and boxes of ``split``, which is train or eval.

        Raises:
            DataError: a file is missing or damaged, or class ids do not count from 0.
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
    """Return the prepared folder ``root``, in our format or the reference's.

    Raises:
        DataError: ``root`` has neither format, or the manifest is invalid or missing, for example after an
            interruption.
    """
    if is_reference_format(root):
        return Prepared(root, None)
    return Prepared(root, manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS))


def is_reference_format(root: Path) -> bool:
    """Return whether the reference's script made ``root``: it has labels, and neither a manifest nor columns."""
    folders = [root / folder for folder in SPLITS.values()]
    ours = (root / manifest.NAME).exists() or any((folder / BOXES).exists() for folder in folders)
    return not ours and all((folder / LABELS).is_file() for folder in folders)


def _check_classes(path: Path, class_id: NDArray[np.int64]) -> None:
    """Raise :class:`DataError` unless class ids are 0, 1, 2 ..., which are output channels of the network."""
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
