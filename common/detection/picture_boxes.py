"""Annotations in the form that batches need: boxes for training, and ids and sizes for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.ragged import bounds_of
from common.detection.annotations import Annotations
from common.errors import DataError
from common.vision.pictures import Columns, Pictures, Sample


@dataclass(frozen=True)
class PictureBoxes:
    """Boxes of :class:`Annotations` grouped by picture index; within a picture they keep their order.

    Attributes:
        size: (P, 2) int64, height and width of each picture, px.
        bounds: (P + 1,) int64, start of the boxes of each picture, then the end of the last one's.
        corners: (N, 4) float32, x1, y1, x2, y2, px, clamped to the picture and never empty.
        class_id: (N,) int64, ids of classes.
    """

    size: NDArray[np.int64]
    bounds: NDArray[np.int64]
    corners: NDArray[np.float32]
    class_id: NDArray[np.int64]

    @classmethod
    def of(cls, annotations: Annotations) -> PictureBoxes:
        """Return the boxes of ``annotations``, with crowds but without boxes that are empty inside the picture."""
        index_N = annotations.picture_indices()
        size_P2 = np.stack([annotations.picture_height, annotations.picture_width], 1)
        limits_N2 = size_P2[index_N][:, ::-1]
        first_N2, size_N2 = annotations.box_xywh[:, :2], annotations.box_xywh[:, 2:]
        clamped = [np.clip(corner_N2, 0, limits_N2) for corner_N2 in (first_N2, first_N2 + size_N2)]
        corners_N4 = np.concatenate(clamped, axis=1).astype(np.float32)
        kept = np.flatnonzero(np.all(corners_N4[:, 2:] > corners_N4[:, :2], axis=1))
        kept = kept[np.argsort(index_N[kept], kind="stable")]
        bounds = bounds_of(np.bincount(index_N[kept], minlength=len(size_P2)))
        return cls(size_P2, bounds, corners_N4[kept], annotations.box_class[kept])

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of boxes of each picture, (P,)."""
        return np.diff(self.bounds)

    def resized(
        self, index: int, height: int, width: int, mirrored: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the corners (M, 4) and classes (M,) of a picture's boxes, optionally mirrored, then resized.

        Args:
            height, width: new size of the picture, px.
            mirrored: mirror left to right.
        """
        part = slice(self.bounds[index], self.bounds[index + 1])
        corners_M4 = self.corners[part].copy()
        old_height, old_width = self.size[index].tolist()
        if mirrored:
            corners_M4[:, [0, 2]] = np.float32(old_width) - corners_M4[:, [2, 0]]
        corners_M4 *= np.array([width / old_width, height / old_height] * 2, np.float32)
        return corners_M4, self.class_id[part]


def require_capacity(count_P: NDArray[np.integer], capacity: int, pictures: Pictures) -> None:
    """Refuse pictures with more boxes than a batch can hold.

    Args:
        count_P: number of boxes of each picture.
        capacity: capacity of a batch, in boxes per picture.
        pictures: the pictures, which are closed in case of an error.

    Raises:
        DataError: there is such a picture. The message names the one with most boxes.
    """
    index = int(count_P.argmax())
    if count_P[index] > capacity:
        pictures.close()
        raise DataError(
            f"{pictures.describe(index)} has {count_P[index]} boxes, and a batch holds at most {capacity}: "
            f"use reader.max_boxes={count_P[index]}"
        )


def empty_boxes(pictures: int, capacity: int, pin_memory: bool = False) -> dict[str, Tensor]:
    """Return zeros for a batch: ``boxes`` (B, M, 4) fp32, ``label`` (B, M) int64 and ``count`` (B,) int64.

    Args:
        pin_memory: use pinned memory, for asynchronous copies to a GPU.
    """
    return {
        "boxes": torch.zeros((pictures, capacity, 4), pin_memory=pin_memory),
        "label": torch.zeros((pictures, capacity), dtype=torch.int64, pin_memory=pin_memory),
        "count": torch.zeros(pictures, dtype=torch.int64, pin_memory=pin_memory),
    }


def put_boxes(
    tensors: dict[str, Tensor], slot: int, corners_M4: NDArray[np.float32], class_M: NDArray[np.int64]
) -> None:
    """Write the boxes of one picture into ``slot`` of the result of :func:`empty_boxes`."""
    count = len(class_M)
    tensors["boxes"][slot, :count] = torch.from_numpy(corners_M4)
    tensors["label"][slot, :count] = torch.from_numpy(class_M)
    tensors["count"][slot] = count


class BoxColumns(Columns):
    """Columns of :func:`empty_boxes`; a subclass fills them.

    Args:
        capacity: M, capacity of a batch in boxes per picture.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def empty(self, samples: Sequence[Sample], slots: int, pin_memory: bool) -> dict[str, Tensor]:
        """Return zeros; see :class:`common.vision.pictures.Columns`."""
        return empty_boxes(slots, self._capacity, pin_memory)


class EvaluationColumns(Columns):
    """Columns of an evaluation: ``picture`` (B,) int64, ids, and ``size`` (B, 2) fp32, height and width, px.

    Padding has id -1 and size 0.
    """

    def __init__(self, annotations: Annotations) -> None:
        self._annotations = annotations

    def empty(self, samples: Sequence[Sample], slots: int, pin_memory: bool) -> dict[str, Tensor]:
        """Return the columns of pictures; see :class:`common.vision.pictures.Columns`."""
        annotations, chosen = self._annotations, np.array([sample[1] for sample in samples], np.int64)
        picture_B = torch.full((slots,), -1, pin_memory=pin_memory)
        size_B2 = torch.zeros((slots, 2), pin_memory=pin_memory)
        picture_B[: len(chosen)] = torch.from_numpy(annotations.picture_id[chosen])
        for number, column in enumerate((annotations.picture_height, annotations.picture_width)):
            size_B2[: len(chosen), number] = torch.from_numpy(column[chosen])
        return {"picture": picture_B, "size": size_B2}
