"""The prepared format: records of pictures, and columns of their objects, boxes and outlines in the same order.

- ``train.rec``, ``train.idx``, ``val.rec``, ``val.idx``: unchanged JPEG bytes of the pictures, by rising id;
- ``train/*.npy``: :class:`common.detection.annotations.Annotations` and polygons of the objects for training;
- ``val/*.npy``: annotations and segmentations of all objects;
- ``manifest.json``.

Shapes: P pictures, N objects of all pictures.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data import manifest
from common.data.manifest import Manifest
from common.data.ragged import bounds_of
from common.detection.annotations import Annotations
from common.detection.coco_pictures import SPLITS, CocoPictures, prepare_command
from common.detection.polygons import Polygons
from common.detection.segmentations import Segmentations

BENCHMARK = "maskrcnn"
FORMAT = "coco-masks/1"
PREPARE_COMMAND = prepare_command(BENCHMARK)
COUNTS = (
    "train_samples",
    "eval_samples",
    "classes",
    *(f"{split}_{what}" for split in SPLITS for what in ("objects", "polygons", "points", "longest_side")),
)
"""Counts in the manifest that must be at least 1; longest sides in px. ``train_runs`` and ``val_runs`` can be 0."""


@dataclass(frozen=True)
class TrainingObjects:
    """Objects for training, without crowds and without boxes that are empty inside the picture.

    Objects are sorted by picture. A picture can have no object.

    Attributes:
        size: (P, 2) height and width of each published picture, px.
        bounds: (P + 1,) index of each picture's first object, and the number of objects.
        corners: (N, 4) x1, y1, x2, y2 of the first and last pixel, px of the published picture.
        label: (N,) classes from 1, by rising category id.
    """

    size: NDArray[np.int64]
    bounds: NDArray[np.int64]
    corners: NDArray[np.float32]
    label: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of objects of each picture, (P,)."""
        return np.diff(self.bounds)


@dataclass(frozen=True)
class Prepared:
    """A prepared folder."""

    root: Path
    manifest: Manifest

    @property
    def synthetic(self) -> bool:
        """Whether the data are synthetic."""
        return self.manifest.synthetic

    def samples(self, split: str) -> int:
        """Return the number of pictures of ``split``, which is ``train`` or ``val``."""
        return self.manifest.counts[SPLITS[split]]

    def annotations(self, split: str) -> Annotations:
        """Return the columns of ``split``, ``train`` or ``val``; damaged files raise :class:`DataError`."""
        counts = self.manifest.counts
        return Annotations.read(self.root / split, counts[SPLITS[split]], counts["classes"], counts[f"{split}_objects"])

    def table(self) -> Polygons:
        """Return the polygons of the training objects in float32; damaged files raise :class:`DataError`."""
        counts = self.manifest.counts
        objects, polygons, points = (counts[f"train_{what}"] for what in ("objects", "polygons", "points"))
        return Polygons.read(self.root / "train", objects, polygons, points, np.float32)

    def train(self) -> tuple[CocoPictures, TrainingObjects]:
        """Open the training pictures, and return them with their objects.

        Raises:
            DataError: a file is missing or damaged.
        """
        annotations = self.annotations("train")
        size_P2 = np.stack([annotations.picture_height, annotations.picture_width], 1)
        index_N = annotations.picture_indices()
        objects = TrainingObjects(
            size_P2,
            bounds_of(np.bincount(index_N, minlength=len(size_P2))),
            legacy_corners(annotations.box_xywh, size_P2[index_N]),
            annotations.labels(),
        )
        return self._pictures("train", annotations), objects

    def validation(self) -> CocoPictures:
        """Open the validation pictures, with the annotations of all objects. Raises like :meth:`train`."""
        return self._pictures("val", self.annotations("val"))

    def truth(self) -> Annotations:
        """Return all validation objects, including crowds, with segmentations. Raises like :meth:`train`.

        The outlines are in float64, so that masks equal those of COCO's own functions.
        """
        counts = self.manifest.counts
        rows = [counts[f"val_{what}"] for what in ("objects", "polygons", "points", "runs")]
        segmentations = Segmentations.read(self.root / "val", *rows)
        return dataclasses.replace(self.annotations("val"), segmentations=segmentations)

    def category_ids(self) -> list[int]:
        """Return COCO's category ids of the classes 1, 2, 3 ..."""
        found: list[int] = self.annotations("val").class_id.tolist()
        return found

    def _pictures(self, split: str, annotations: Annotations) -> CocoPictures:
        return CocoPictures(self.root / f"{split}.rec", annotations, BENCHMARK)


def open_prepared(root: Path) -> Prepared:
    """Return the prepared data under ``root``.

    Raises:
        DataError: the manifest or a file is missing, malformed, or of another format.
    """
    return Prepared(root, manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS))


def legacy_corners(xywh_N4: NDArray[np.float64], size_N2: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return box corners (N, 4): the first and last pixels of the boxes, clipped to their pictures.

    ``x2 = x + max(width - 1, 0)``, clipped to [0, W - 1]; y likewise. In float32, as in the reference.

    Args:
        xywh_N4: boxes in COCO's format.
        size_N2: height and width of each box's picture, px.
    """
    last_N2 = (size_N2[:, ::-1] - 1).astype(np.float32)
    first_N2, extent_N2 = xywh_N4[:, :2].astype(np.float32), xywh_N4[:, 2:].astype(np.float32)
    ends = first_N2, first_N2 + np.maximum(extent_N2 - np.float32(1), np.float32(0))
    return np.concatenate([np.clip(end_N2, np.float32(0), last_N2) for end_N2 in ends], axis=1)


def has_area(corners_N4: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return (N,) whether a box is wider and higher than one pixel."""
    return np.asarray(np.all(corners_N4[:, 2:] > corners_N4[:, :2], axis=1))
