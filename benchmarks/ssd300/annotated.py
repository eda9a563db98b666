"""Prepared pictures with their boxes: JPEG records, and annotation columns in the same order.

Shapes: P pictures, M boxes of one picture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.manifest import Manifest
from common.data.ragged import bounds_of
from common.detection.annotations import Annotations
from common.detection.coco_pictures import SPLITS, CocoPictures, prepare_command

BENCHMARK = "ssd300"
FORMAT = "coco-boxes/1"
PREPARE_COMMAND = prepare_command(BENCHMARK)


def read_annotations(root: Path, split: str, found: Manifest) -> Annotations:
    """Read the columns of a split. Columns that are damaged or do not fit the manifest raise :class:`DataError`."""
    counts = found.counts
    return Annotations.read(root / split, counts[SPLITS[split]], counts["classes"], counts[f"{split}_boxes"])


class AnnotatedPictures(CocoPictures):
    """Pictures of a split and their boxes, by index.

    Args:
        root: prepared data.
        split: ``train`` or ``val``.
        found: the manifest of ``root``.

    Raises:
        DataError: records or columns are missing, damaged, or differ in number.
    """

    def __init__(self, root: Path, split: str, found: Manifest) -> None:
        super().__init__(root / f"{split}.rec", read_annotations(root, split, found), BENCHMARK)
        self._shares_N4, self._label_N, self._bounds = _by_picture(self.annotations)

    def boxes(self, place: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return (M, 4) corners as fractions of the picture and (M,) classes, from 1 in the order of the class ids."""
        mine = slice(self._bounds[place], self._bounds[place + 1])
        return self._shares_N4[mine], self._label_N[mine]

    def require_room(self, room: int) -> None:
        """Check that no picture has more than ``room`` boxes.

        Raises:
            DataError: the message names the picture.
        """
        self.refuse_more(np.diff(self._bounds), room)


def _by_picture(
    annotations: Annotations,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return corners as fractions and classes from 1, sorted by picture, and the bounds of each picture in them."""
    place_N = annotations.places()
    order_N = np.argsort(place_N, kind="stable")
    place_N = place_N[order_N]
    x, y, width, height = annotations.box_xywh[order_N].T
    corners_N4 = np.stack([x, y, x + width, y + height], axis=1)
    sides_N2 = np.stack([annotations.picture_width[place_N], annotations.picture_height[place_N]], axis=1)
    counts_P = np.bincount(place_N, minlength=len(annotations.picture_id))
    return corners_N4 / np.tile(sides_N2, (1, 2)), annotations.labels()[order_N], bounds_of(counts_P)
