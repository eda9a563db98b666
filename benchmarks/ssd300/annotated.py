"""Prepared pictures with their boxes: records of JPEG, and the columns of their annotations in the same order.

Shapes: P pictures, M boxes of one of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from common.data.manifest import NAME as MANIFEST
from common.data.manifest import Manifest
from common.data.ragged import bounds_of
from common.detection.annotations import Annotations
from common.errors import DataError
from common.formats.jpeg import decode, jpeg_size
from common.formats.recordio import RecordReader

FORMAT = "coco-boxes/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=ssd300 --raw-dir RAW --data-dir DATA"
SPLITS = {"train": "train_samples", "val": "eval_samples"}
"""Split to what the manifest calls its pictures; its boxes are ``<split>_boxes``."""
_VERIFY = "check the data with 'mlperf-suite verify benchmark=ssd300'"


def read_annotations(root: Path, split: str, found: Manifest) -> Annotations:
    """The columns of a split; raises :class:`DataError` if they are damaged or not what the manifest counts."""
    counts = found.counts
    return Annotations.read(root / split, counts[SPLITS[split]], counts["classes"], counts[f"{split}_boxes"])


class AnnotatedPictures:
    """The pictures of a split and their boxes, by their places.

    Args:
        root: prepared data.
        split: ``train`` or ``val``.
        found: the manifest of ``root``.

    Attributes:
        annotations: the columns.
        path: the records.

    Raises:
        DataError: records or columns are missing, damaged, or differ in number.
    """

    def __init__(self, root: Path, split: str, found: Manifest) -> None:
        self.annotations = read_annotations(root, split, found)
        self.path = root / f"{split}.rec"
        self._shares_N4, self._label_N, self._bounds = _by_picture(self.annotations)
        self._records = RecordReader(self.path)
        if len(self._records) != len(self):
            have, wanted = len(self._records), len(self)
            self._records.close()
            raise DataError(f"{self.path} has {have} records where {MANIFEST} says {wanted}; run '{PREPARE_COMMAND}'")

    def __len__(self) -> int:
        return len(self.annotations.picture_id)

    def boxes(self, place: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """(M, 4) corners as shares of the picture, float64; (M,) classes, counted from 1 in the order of the file."""
        mine = slice(self._bounds[place], self._bounds[place + 1])
        return self._shares_N4[mine], self._label_N[mine]

    def jpeg(self, place: int) -> bytes:
        """The encoded picture; raises :class:`DataError` where the record is damaged or of another picture."""
        record = self._records.image(place)
        if record.record_id != self.annotations.picture_id[place]:
            raise DataError(
                f"{self._records.describe(place)}: holds picture {record.record_id}, its boxes are those of picture "
                f"{self.annotations.picture_id[place]}; {_VERIFY}"
            )
        return record.data

    def whole_jpeg(self, place: int) -> bytes:
        """The encoded picture, which has the size that its annotations say; raises as :meth:`picture` does.

        For decoders that take a truncated picture and leave the rest of it grey.
        """
        data = self.jpeg(place)
        try:
            found = jpeg_size(data)
        except ValueError as error:
            raise self._undecodable(place, error) from error
        if found != self.size(place):
            raise DataError(f"{self.describe(place)} is of {found} px, its boxes for {self.size(place)}; {_VERIFY}")
        return data

    def size(self, place: int) -> tuple[int, int]:
        """Width and height, px."""
        return int(self.annotations.picture_width[place]), int(self.annotations.picture_height[place])

    def picture(self, place: int) -> Image.Image:
        """The picture; raises :class:`DataError` where it cannot be decoded, or as :meth:`jpeg`."""
        try:
            return decode(self.jpeg(place))
        except ValueError as error:
            raise self._undecodable(place, error) from error

    def _undecodable(self, place: int, error: ValueError) -> DataError:
        return DataError(f"{self.describe(place)} cannot be decoded: {error}; {_VERIFY}")

    def describe(self, place: int) -> str:
        """The picture, for messages."""
        return f"{self.path}: picture {self.annotations.picture_id[place]}"

    def require_room(self, room: int) -> None:
        """Refuse a picture with more than ``room`` boxes.

        Raises:
            DataError: naming it.
        """
        counts = np.diff(self._bounds)
        if (place := int(counts.argmax())) >= 0 and counts[place] > room:
            raise DataError(
                f"{self.describe(place)} has {counts[place]} boxes, and a batch has room for {room}: "
                f"use reader.max_boxes={counts[place]}"
            )

    def close(self) -> None:
        """Close the records."""
        self._records.close()


def _by_picture(
    annotations: Annotations,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Boxes as corners and shares, and classes from 1, sorted by picture; and where each picture's begin and end."""
    place_N = _places(annotations.picture_id, annotations.box_picture)
    order_N = np.argsort(place_N, kind="stable")
    place_N = place_N[order_N]
    x, y, width, height = annotations.box_xywh[order_N].T
    corners_N4 = np.stack([x, y, x + width, y + height], axis=1)
    sides_N2 = np.stack([annotations.picture_width[place_N], annotations.picture_height[place_N]], axis=1)
    label_N = _places(annotations.class_id, annotations.box_class[order_N]) + 1
    counts_P = np.bincount(place_N, minlength=len(annotations.picture_id))
    return corners_N4 / np.tile(sides_N2, (1, 2)), label_N, bounds_of(counts_P)


def _places(ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of ``wanted`` stands among ``ids``, which has all of them."""
    order = np.argsort(ids)
    places: NDArray[np.int64] = order[np.searchsorted(ids, wanted, sorter=order)]
    return places
