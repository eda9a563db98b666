"""Boxes of ground truth as columns, read from COCO's JSON and kept in numpy's files.

COCO's format: ``images`` with ``id``, ``height`` and ``width``; ``categories`` with ``id``; ``annotations`` with
``image_id``, ``category_id``, ``bbox`` (x, y, width, height in pixels), ``area`` and ``iscrowd``. Shapes: P pictures,
K classes, N boxes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.atomic import written
from common.errors import DataError
from common.formats import npy


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

    def write(self, folder: Path) -> list[Path]:
        """Write each column as ``<name>.npy`` into ``folder``, which is made if need be; returns the files."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        made = {folder / f"{name}.npy": column for name, column in columns.items() if column is not None}
        for path, column in made.items():
            with written(path) as partial, open(partial, "wb") as file:
                np.save(file, column, allow_pickle=False)
        return list(made)

    @classmethod
    def read(cls, folder: Path, pictures: int, classes: int, boxes: int, names: bool = False) -> Annotations:
        """The columns in ``folder``, of so many pictures, classes and boxes, with ``picture_name`` or without.

        Raises:
            DataError: a file is missing, cut off, or of another type or size.
        """
        lengths = {"picture": pictures, "class": classes, "box": boxes}
        columns: dict[str, Any] = {}
        for field in fields(cls):
            dtype = np.dtype(_DTYPES.get(field.name, np.int64))
            shape = (lengths[field.name.split("_")[0]], *((4,) if field.name == "box_xywh" else ()))
            if field.name != "picture_name" or names:
                columns[field.name] = read_column(folder / f"{field.name}.npy", dtype, shape)
        return cls(**columns)


_DTYPES: dict[str, Any] = {
    "box_xywh": np.float64,
    "box_area": np.float64,
    "box_crowd": np.bool_,
    "picture_name": np.bytes_,  # of any length
}


def read_column(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of numpy's file ``path``; a ``dtype`` of bytes without a length stands for any length.

    Raises:
        DataError: the file is missing, cut off, or of another type or size.
    """
    try:
        column = npy.load(path, dtype, shape)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    same = column.dtype.kind == "S" if dtype == np.dtype(np.bytes_) else column.dtype == dtype
    if not same or column.shape != shape:
        raise DataError(f"{path}: is {column.dtype} {column.shape}, not {dtype} {shape}; prepare the data anew")
    return column


def read_coco(path: Path, names: bool = False) -> Annotations:
    """The boxes of a JSON file of COCO's format; with ``picture_name``, from ``file_name``, if ``names``.

    Raises:
        DataError: it is not one; an id of a picture or class comes twice; a box is of an unknown one; a number is
            missing, negative or not finite; a name is missing.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error
    pictures, classes, boxes = (_Entries.of(content, name, path) for name in ("images", "categories", "annotations"))
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
    )


@dataclass(frozen=True)
class _Entries:
    """A list of a file, whose entries have numbers under names.

    Attributes:
        place: file and list, for messages.
        entries: objects.
    """

    place: str
    entries: Sequence[dict[str, Any]]

    @staticmethod
    def of(content: Any, name: str, path: Path) -> _Entries:
        entries = content.get(name) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"{path}: has no list {name!r} of objects; it is not of COCO's format")
        return _Entries(f"{path}: {name}", entries)

    def ids(self, key: str) -> NDArray[np.int64]:
        """Integers."""
        self._refuse_others(key, _is_integer, "an integer")
        return np.array([entry[key] for entry in self.entries], np.int64)

    def integers(self, key: str) -> NDArray[np.int64]:
        """Integers of 0 or more."""
        values = self.ids(key)
        self.refuse(values < 0, key, "0 or more")
        return values

    def numbers(self, key: str, width: int = 0) -> NDArray[np.float64]:
        """Finite numbers, or lists of ``width`` of them."""

        def fit(value: Any) -> bool:
            if width:
                return type(value) is list and len(value) == width and all(_is_number(one) for one in value)
            return _is_number(value)

        self._refuse_others(key, fit, f"a list of {width} numbers" if width else "a number")
        values = np.array([entry[key] for entry in self.entries], np.float64).reshape(len(self.entries), max(width, 1))
        self.refuse(np.any(~np.isfinite(values), axis=1), key, "finite")
        return values if width else values[:, 0]

    def names(self, key: str) -> NDArray[np.bytes_]:
        """Texts, in UTF-8."""
        self._refuse_others(key, _is_name, "a name")
        return np.array([entry[key].encode() for entry in self.entries], np.bytes_)

    def refuse(self, wrong: NDArray[np.bool_], key: str, expected: str) -> None:
        """Raise DataError with the first entry that is ``wrong``."""
        if wrong.any():
            self._raise(int(wrong.argmax()), key, expected)

    def check_once(self, ids: NDArray[np.int64], key: str) -> None:
        """Raise DataError with the first entry whose id came before."""
        again = np.ones(len(ids), np.bool_)
        again[np.unique(ids, return_index=True)[1]] = False
        self.refuse(again, key, "one that no entry before has")

    def _refuse_others(self, key: str, fit: Callable[[Any], bool], expected: str) -> None:
        for number, entry in enumerate(self.entries):
            if not fit(entry.get(key)):
                self._raise(number, key, expected)

    def _raise(self, number: int, key: str, expected: str) -> None:
        entry = self.entries[number]
        said = f"is {entry[key]!r:.80}" if key in entry else "is missing"
        raise DataError(f"{self.place}[{number}]: {key!r} {said}, but must be {expected}")


def _is_integer(value: Any) -> bool:
    """Whether a value of JSON is an integer of 64 bits; ``true`` is none."""
    return type(value) is int and abs(value) < 2**63


def _is_name(value: Any) -> bool:
    return type(value) is str and value != "" and value.isprintable()


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_integer(value)
