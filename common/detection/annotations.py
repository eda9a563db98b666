"""Ground-truth boxes as columns, read from COCO JSON and stored in ``.npy`` files.

COCO's format: ``images`` with ``id``, ``height`` and ``width``; ``categories`` with ``id``; ``annotations`` with
``image_id``, ``category_id``, ``bbox`` (x, y, width, height in pixels), ``area``, ``iscrowd`` and optionally
``segmentation``. Shapes: P pictures, K classes, N boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.detection.columns import read_column, write_columns
from common.detection.json_entries import Entries
from common.detection.segmentations import Segmentations
from common.untrusted.strict_json import read_large_json


@dataclass(frozen=True)
class Annotations:
    """Columns of annotations, in the order of the file.

    Attributes:
        picture_id: (P,) int64, unique.
        picture_height, picture_width: (P,) int64, pixels.
        class_id: (K,) int64, unique.
        box_picture: (N,) int64, ids of pictures.
        box_class: (N,) int64, ids of classes.
        box_xywh: (N, 4) float64, pixels.
        box_area: (N,) float64, square pixels; area of the outline if there is one.
        box_crowd: (N,) bool, whether the box is around many objects.
        picture_name: (P,) bytes, file names of the pictures in UTF-8; None if not requested.
        segmentations: segmentations of the N boxes, stored in separate files; None if not requested.
    """

    picture_id: NDArray[np.int64]
    picture_height: NDArray[np.int64]
    picture_width: NDArray[np.int64]
    class_id: NDArray[np.int64]
    box_picture: NDArray[np.int64]
    box_class: NDArray[np.int64]
    box_xywh: NDArray[np.float64]
    box_area: NDArray[np.float64]
    box_crowd: NDArray[np.bool_]
    picture_name: NDArray[np.bytes_] | None = None
    segmentations: Segmentations | None = None

    def write(self, folder: Path) -> list[Path]:
        """Write each column as ``<name>.npy`` into ``folder``, which is created if needed; return the files."""
        columns = {name: getattr(self, name) for name in _columns()}
        files = write_columns(folder, {name: column for name, column in columns.items() if column is not None})
        return files if self.segmentations is None else [*files, *self.segmentations.write(folder)]

    @classmethod
    def read(cls, folder: Path, pictures: int, classes: int, boxes: int, names: bool = False) -> Annotations:
        """Return the columns in ``folder``, without segmentations; the numbers of entries must match.

        Args:
            names: whether to read ``picture_name``.

        Raises:
            DataError: a file is missing, truncated, or of another type or size.
        """
        lengths = {"picture": pictures, "class": classes, "box": boxes}
        columns: dict[str, Any] = {}
        for name in _columns():
            dtype = np.dtype(_DTYPES.get(name, np.int64))
            shape = (lengths[name.split("_")[0]], *((4,) if name == "box_xywh" else ()))
            if name != "picture_name" or names:
                columns[name] = read_column(folder / f"{name}.npy", dtype, shape)
        return cls(**columns)

    def picture_indices(self) -> NDArray[np.int64]:
        """Return the index of each box's picture among the P pictures, (N,)."""
        return indices_of(self.picture_id, self.box_picture)

    def labels(self) -> NDArray[np.int64]:
        """Return the label of each box, (N,): the index of its class among the K classes, plus 1."""
        return indices_of(self.class_id, self.box_class) + 1


def indices_of(ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each of ``wanted`` in ``ids``, which contains all of them."""
    order = np.argsort(ids)
    indices: NDArray[np.int64] = order[np.searchsorted(ids, wanted, sorter=order)]
    return indices


def _columns() -> list[str]:
    return [field.name for field in fields(Annotations) if field.name != "segmentations"]


_DTYPES: dict[str, Any] = {
    "box_xywh": np.float64,
    "box_area": np.float64,
    "box_crowd": np.bool_,
    "picture_name": np.bytes_,  # of any length
}


def read_coco(path: Path, names: bool = False, segmentations: bool = False) -> Annotations:
    """Return the annotations of a COCO JSON file.

    Args:
        names: read ``picture_name``, from ``file_name``.

    Raises:
        DataError: the file has another format; an id of a picture or class occurs twice; a box refers to an unknown
            one; a number is missing, negative or not finite; a name is missing; a polygon or run lengths violate
            :mod:`common.detection.segmentations`.
    """
    content = read_large_json(path)
    pictures, classes, boxes = (Entries.of(content, name, path) for name in ("images", "categories", "annotations"))
    picture_id, class_id = pictures.ids("id"), classes.ids("id")
    pictures.check_once(picture_id, "id")
    classes.check_once(class_id, "id")
    crowd = boxes.integers("iscrowd")
    boxes.refuse(crowd > 1, "iscrowd", "0 or 1")
    size = {name: pictures.integers(name) for name in ("height", "width")}
    for name, column in size.items():
        pictures.refuse(column == 0, name, "above 0")
    box_picture, box_class = boxes.ids("image_id"), boxes.ids("category_id")
    boxes.refuse(~np.isin(box_picture, picture_id), "image_id", "an id of images")
    boxes.refuse(~np.isin(box_class, class_id), "category_id", "an id of categories")
    box_xywh = boxes.numbers("bbox", 4)
    boxes.refuse(np.any(box_xywh[:, 2:] < 0, axis=1), "bbox", "of a width and height of 0 or more")
    box_area = boxes.numbers("area")
    boxes.refuse(box_area < 0, "area", "0 or more")
    index_N = indices_of(picture_id, box_picture)
    return Annotations(
        picture_id,
        size["height"],
        size["width"],
        class_id,
        box_picture,
        box_class,
        box_xywh,
        box_area,
        crowd.astype(np.bool_),
        pictures.names("file_name") if names else None,
        Segmentations.of(boxes, size["height"][index_N], size["width"][index_N]) if segmentations else None,
    )
