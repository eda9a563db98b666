"""The prepared format: records of pictures, and columns of their objects, boxes and outlines in the same order.

- ``train.rec``, ``train.idx``, ``val.rec``, ``val.idx``: the pictures' JPEG bytes as they are, by rising id;
- ``train/*.npy``: :class:`common.detection.annotations.Annotations` of what networks are trained on, and its polygons;
- ``val/*.npy``: the annotations of all objects, and their segmentations;
- ``manifest.json``.

Shapes: P pictures, N objects of all of them.
"""

from __future__ import annotations

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
"""What the manifest counts, and ``train_runs`` (0) and ``val_runs``, which may be 0; the longest side is in px."""


@dataclass(frozen=True)
class TrainingObjects:
    """What networks are trained on: no box around many objects, and none that is empty within its picture.

    Objects lie picture by picture. A picture may have none left.

    Attributes:
        size: (P, 2) int64, height and width of each picture as it is published, px.
        bounds: (P + 1,) int64, where the objects of each picture begin, and where the last one's end.
        corners: (N, 4) float32, x1, y1, x2, y2 of the first and last pixel, px of the published picture.
        label: (N,) int64, classes from 1, by rising id of the category.
        polygons: of the N objects, float32.
    """

    size: NDArray[np.int64]
    bounds: NDArray[np.int64]
    corners: NDArray[np.float32]
    label: NDArray[np.int64]
    polygons: Polygons

    @property
    def counts(self) -> NDArray[np.int64]:
        """(P,) objects of each picture."""
        return np.diff(self.bounds)


@dataclass(frozen=True)
class TrainingPictures:
    """The training pictures, and what is in them."""

    pictures: CocoPictures
    objects: TrainingObjects

    def __len__(self) -> int:
        return len(self.pictures)

    def require_room(self, room: int) -> None:
        """Raise :class:`DataError` with a picture of more than ``room`` objects."""
        self.pictures.refuse_more(self.objects.counts, room)


@dataclass(frozen=True)
class Truth:
    """What detections are compared with: all objects of all validation pictures, crowds among them.

    Attributes:
        annotations: by rising id of the pictures; the classes by rising id.
        segmentations: of the same objects in the same order; float64, so that masks are those of COCO's own functions.
    """

    annotations: Annotations
    segmentations: Segmentations


@dataclass(frozen=True)
class Prepared:
    """A prepared folder."""

    root: Path
    manifest: Manifest

    @property
    def stand_in(self) -> bool:
        """Whether the data are generated."""
        return self.manifest.stand_in

    def samples(self, split: str) -> int:
        """Pictures of ``split``, ``train`` or ``val``."""
        return self.manifest.counts[SPLITS[split]]

    def annotations(self, split: str) -> Annotations:
        """The columns of ``split``, ``train`` or ``val``; raises :class:`DataError` if a file is damaged."""
        counts = self.manifest.counts
        return Annotations.read(self.root / split, counts[SPLITS[split]], counts["classes"], counts[f"{split}_objects"])

    def table(self) -> Polygons:
        """The polygons of the training objects, in float32; raises :class:`DataError` if a file is damaged."""
        counts = self.manifest.counts
        objects, polygons, points = (counts[f"train_{what}"] for what in ("objects", "polygons", "points"))
        return Polygons.read(self.root / "train", objects, polygons, points, np.float32)

    def train(self) -> TrainingPictures:
        """The training pictures, open.

        Raises:
            DataError: a file is missing or damaged.
        """
        annotations = self.annotations("train")
        polygons = self.table()
        size_P2 = np.stack([annotations.picture_height, annotations.picture_width], 1)
        place_N = annotations.places()
        objects = TrainingObjects(
            size_P2,
            bounds_of(np.bincount(place_N, minlength=len(size_P2))),
            legacy_corners(annotations.box_xywh, size_P2[place_N]),
            annotations.labels(),
            polygons,
        )
        return TrainingPictures(self._pictures("train", annotations), objects)

    def validation(self) -> CocoPictures:
        """The validation pictures, open, with the annotations of all objects; raises as :meth:`train`."""
        return self._pictures("val", self.annotations("val"))

    def truth(self) -> Truth:
        """What there is in the validation pictures, which stay closed; raises as :meth:`train`."""
        counts = self.manifest.counts
        rows = [counts[f"val_{what}"] for what in ("objects", "polygons", "points", "runs")]
        return Truth(self.annotations("val"), Segmentations.read(self.root / "val", *rows))

    def category_ids(self) -> list[int]:
        """What COCO calls the classes 1, 2, 3 ..."""
        found: list[int] = self.annotations("val").class_id.tolist()
        return found

    def _pictures(self, split: str, annotations: Annotations) -> CocoPictures:
        return CocoPictures(self.root / f"{split}.rec", annotations, BENCHMARK)


def open_prepared(root: Path) -> Prepared:
    """The prepared data under ``root``.

    Raises:
        DataError: the manifest or a file is missing, garbled, or of another format.
    """
    return Prepared(root, manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS))


def legacy_corners(xywh_N4: NDArray[np.float64], size_N2: NDArray[np.int64]) -> NDArray[np.float32]:
    """Corners (N, 4) of boxes: their first and last pixels, within their pictures.

    ``x2 = x + max(width - 1, 0)``, and all of it cut to [0, W - 1]; y likewise. In float32, as the reference has it.

    Args:
        xywh_N4: boxes as COCO has them.
        size_N2: height and width of the picture of each, px.
    """
    last_N2 = (size_N2[:, ::-1] - 1).astype(np.float32)
    first_N2, extent_N2 = xywh_N4[:, :2].astype(np.float32), xywh_N4[:, 2:].astype(np.float32)
    ends = first_N2, first_N2 + np.maximum(extent_N2 - np.float32(1), np.float32(0))
    return np.concatenate([np.clip(end_N2, np.float32(0), last_N2) for end_N2 in ends], axis=1)


def has_area(corners_N4: NDArray[np.float32]) -> NDArray[np.bool_]:
    """(N,) whether a box is wider and higher than one pixel."""
    return np.asarray(np.all(corners_N4[:, 2:] > corners_N4[:, :2], axis=1))
