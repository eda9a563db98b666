"""Overlaps of detected masks with ground truth, computed on run lengths by the functions of COCO's mask API.

Pictures are independent, so they can be distributed over several processes, which do not need PyTorch.

Shapes: D detections, M detections of this process's pictures, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from common.data.ragged import bounds_of, take
from common.detection.annotations import Annotations, indices_of

MASKS_AT_ONCE = 16_384
"""Masks whose areas are summed at a time."""


@dataclass(frozen=True)
class MaskColumns:
    """Detected masks.

    Attributes:
        picture_id, class_id: (D,) int64.
        run_count: (D,) int32, number of runs of each mask.
        runs: all runs: pixels outside and inside alternately, column by column of the whole picture; int32.
    """

    picture_id: NDArray[np.int64]
    class_id: NDArray[np.int64]
    run_count: NDArray[np.int32]
    runs: NDArray[np.int32]


@dataclass(frozen=True)
class MaskOverlaps:
    """Areas and overlaps of some detections.

    Attributes:
        row: (M,) rows of the detections, int64.
        area: (M,) their areas, square px, float64.
        detection, truth: (P,) rows of detections and ground truth of the same picture and class that overlap, int64.
        overlap: (P,) intersection over union, for a crowd over the detection's area; float64.
    """

    row: NDArray[np.int64]
    area: NDArray[np.float64]
    detection: NDArray[np.int64]
    truth: NDArray[np.int64]
    overlap: NDArray[np.float64]


@dataclass(frozen=True)
class _Group:
    """Ground truth of one picture and class: its rows, masks in COCO's compressed runs, and crowd flags."""

    row: NDArray[np.int64]
    masks: list[dict[str, Any]]
    crowd: list[int]


class TruthMasks:
    """Ground-truth masks of every ``shares``-th picture.

    Args:
        truth: annotations with segmentations.
        share: index of the first of these pictures.
        shares: number of such sets.
    """

    def __init__(self, truth: Annotations, share: int = 0, shares: int = 1) -> None:
        assert truth.segmentations is not None, "ground truth has masks"
        order = np.argsort(truth.picture_id)
        self._picture_id = truth.picture_id[order]
        self._height, self._width = truth.picture_height[order], truth.picture_width[order]
        self._share, self._shares = share, shares
        index_N = indices_of(self._picture_id, truth.box_picture)
        row_M = np.flatnonzero(index_N % shares == share)
        self._groups: dict[tuple[int, int], _Group] = {}
        for rows in _rows_by_group(index_N[row_M], truth.box_class[row_M]):
            members = row_M[rows]
            index = int(index_N[members[0]])
            height, width = self._size(index)
            self._groups[index, int(truth.box_class[members[0]])] = _Group(
                members,
                [_compressed(truth.segmentations.coco(int(row), height, width), height, width) for row in members],
                truth.box_crowd[members].astype(int).tolist(),
            )

    def overlaps(self, found: MaskColumns, threshold: float) -> MaskOverlaps:
        """Return the areas of the detections in these pictures, and their overlaps of at least ``threshold``.

        Raises:
            ValueError: a detection has an unknown picture, or its runs do not cover the picture.
        """
        index_D = np.searchsorted(self._picture_id, found.picture_id)
        known_D = np.take(self._picture_id, index_D, mode="clip") == found.picture_id
        if not known_D.all():
            raise ValueError(f"a mask is of picture {found.picture_id[~known_D][0]}, which is not known")
        row_M = np.flatnonzero(index_D % self._shares == self._share)
        index_M, class_M, count_M = index_D[row_M], found.class_id[row_M], found.run_count[row_M]
        (runs,) = take(found.run_count, row_M, found.runs)
        bounds = bounds_of(count_M)
        covered_M, area_M = _pixels(runs, bounds)
        wrong = np.flatnonzero(covered_M != self._height[index_M] * self._width[index_M])
        if len(wrong):
            index = index_M[wrong[0]]
            raise ValueError(
                f"the runs of a mask in picture {self._picture_id[index]} make {covered_M[wrong[0]]} px, but it has "
                f"{self._height[index]} x {self._width[index]}"
            )
        detection, truth, overlap = [row_M[:0]], [row_M[:0]], [np.zeros(0)]
        for members in _rows_by_group(index_M, class_M):
            index = int(index_M[members[0]])
            group = self._groups.get((index, int(class_M[members[0]])))
            if group is None:
                continue
            height, width = self._size(index)
            counts = [{"size": [height, width], "counts": runs[bounds[row] : bounds[row + 1]]} for row in members]
            overlap_MG = coco_mask.iou(coco_mask.frPyObjects(counts, height, width), group.masks, group.crowd)
            of_found, of_truth = np.nonzero(overlap_MG >= threshold)
            detection.append(row_M[members[of_found]])
            truth.append(group.row[of_truth])
            overlap.append(overlap_MG[of_found, of_truth])
        return MaskOverlaps(
            row_M,
            area_M.astype(np.float64),
            np.concatenate(detection),
            np.concatenate(truth),
            np.concatenate(overlap),
        )

    def _size(self, index: int) -> tuple[int, int]:
        return int(self._height[index]), int(self._width[index])


def joined(parts: Sequence[MaskOverlaps]) -> MaskOverlaps:
    """Combine the results for disjoint parts of the detections; rows are in the order of the detections."""
    row = np.concatenate([part.row for part in parts])
    area = np.empty(len(row))
    area[row] = np.concatenate([part.area for part in parts])
    return MaskOverlaps(
        np.arange(len(row)),
        area,
        np.concatenate([part.detection for part in parts]),
        np.concatenate([part.truth for part in parts]),
        np.concatenate([part.overlap for part in parts]),
    )


def _rows_by_group(index: NDArray[np.int64], number: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return sets of rows with the same picture and class, each in ascending order."""
    order = np.lexsort((number, index))
    changes = (np.diff(index[order]) != 0) | (np.diff(number[order]) != 0)
    return np.split(order, np.flatnonzero(changes) + 1) if len(order) else []


def _compressed(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Return a mask in COCO's compressed runs, from run lengths or from polygons, which are merged."""
    if isinstance(segmentation, dict):
        (runs,) = coco_mask.frPyObjects([segmentation], height, width)
    else:
        runs = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    made: dict[str, Any] = runs
    return made


def _pixels(runs: NDArray[np.int32], bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each mask the number of pixels that its runs cover, and the number of pixels inside the mask."""
    masks = len(bounds) - 1
    covered, inside = np.zeros(masks, np.int64), np.zeros(masks, np.int64)
    for first in range(0, masks, MASKS_AT_ONCE):
        part = bounds[first : first + MASKS_AT_ONCE + 1]
        own, starts = runs[part[0] : part[-1]], part - part[0]
        odd = (np.arange(len(own)) - np.repeat(starts[:-1], np.diff(starts))) % 2
        for sums, values in ((covered, own), (inside, own * odd)):
            until = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
            sums[first : first + MASKS_AT_ONCE] = np.diff(until[starts])
    return covered, inside
