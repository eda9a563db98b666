"""Boxes of ground truth as columns, read from COCO's JSON and kept in numpy's files.

COCO's format: ``images`` with ``id``, ``height`` and ``width``; ``categories`` with ``id``; ``annotations`` with
``image_id``, ``category_id``, ``bbox`` (x, y, width, height in pixels), ``area``, ``iscrowd`` and, where masks are
asked for, ``segmentation``. Shapes: P pictures, K classes, N boxes.
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
    """Columns, in the order of the file.

    Attributes:
        picture_id: (P,) int64, each once.
        picture_height, picture_width: (P,) int64, pixels.
        class_id: (K,) int64, each once.
        box_picture: (N,) int64, ids of pictures.
        box_class: (N,) int64, ids of classes.
        box_xywh: (N, 4) float64, pixels.
        box_area: (N,) float64, pixels; of the outline where there is one.
        box_crowd: (N,) bool, whether the box is around many objects.
        picture_name: (P,) bytes, names of the pictures' files in UTF-8; None where nobody asked for them.
        segmentations: of the N boxes; None where nobody asked for them. They have files of their own.
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
        """Write each column as ``<name>.npy`` into ``folder``, which is made if need be; returns the files."""
        columns = {name: getattr(self, name) for name in _columns()}
        files = write_columns(folder, {name: column for name, column in columns.items() if column is not None})
        return files if self.segmentations is None else [*files, *self.segmentations.write(folder)]

    @classmethod
    def read(cls, folder: Path, pictures: int, classes: int, boxes: int, names: bool = False) -> Annotations:
        """The columns in ``folder``, of so many pictures, classes and boxes, with ``picture_name`` or without.

        Raises:
            DataError: a file is missing, cut off, or of another type or size.
        """
        lengths = {"picture": pictures, "class": classes, "box": boxes}
        columns: dict[str, Any] = {}
        for name in _columns():
            dtype = np.dtype(_DTYPES.get(name, np.int64))
            shape = (lengths[name.split("_")[0]], *((4,) if name == "box_xywh" else ()))
            if name != "picture_name" or names:
                columns[name] = read_column(folder / f"{name}.npy", dtype, shape)
        return cls(**columns)

    def places(self) -> NDArray[np.int64]:
        """(N,) places of the boxes' pictures among the P."""
        return places_of(self.picture_id, self.box_picture)

    def labels(self) -> NDArray[np.int64]:
        """(N,) classes from 1, in the order of the K."""
        return places_of(self.class_id, self.box_class) + 1


def places_of(ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of ``wanted`` stands among ``ids``, which has all of them."""
    order = np.argsort(ids)
    places: NDArray[np.int64] = order[np.searchsorted(ids, wanted, sorter=order)]
    return places


def _columns() -> list[str]:
    return [field.name for field in fields(Annotations) if field.name != "segmentations"]


_DTYPES: dict[str, Any] = {
    "box_xywh": np.float64,
    "box_area": np.float64,
    "box_crowd": np.bool_,
    "picture_name": np.bytes_,  # of any length
}


def read_coco(path: Path, names: bool = False, segmentations: bool = False) -> Annotations:
    """The boxes of a JSON file of COCO's format.

    Args:
        path: the file.
        names: with ``picture_name``, from ``file_name``.
        segmentations: with these.

    Raises:
        DataError: it is not one; an id of a picture or class comes twice; a box is of an unknown one; a number is
            missing, negative or not finite; a name is missing; a polygon or run lengths are not as
            :mod:`common.detection.segmentations` says.
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
    place_N = places_of(picture_id, box_picture)
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
        Segmentations.of(boxes, size["height"][place_N], size["width"][place_N]) if segmentations else None,
    )
