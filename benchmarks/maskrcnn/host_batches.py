"""Columns of a batch besides pixels, computed on the host: sizes, boxes and transforms.

Legend: B slots of a batch, M slots for objects of a picture, P pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.maskrcnn.data_settings import DataSettings
from benchmarks.maskrcnn.pictures import resized_sizes
from benchmarks.maskrcnn.prepared import TrainingObjects
from common.data.grouped_order import GroupedStream
from common.detection.annotations import Annotations
from common.detection.picture_boxes import empty_boxes, put_boxes

PADDING = -1
"""Picture id of padding."""


@dataclass(frozen=True)
class Slot:
    """A slot of a training batch.

    Attributes:
        epoch: pass over the samples, from 0.
        place: index of the picture.
        real: False in an incomplete batch for slots that only repeat the first picture.
        seed: seed of the batch.
    """

    epoch: int
    place: int
    real: bool
    seed: int


def slots_of(stream: GroupedStream, number: int) -> list[Slot]:
    """Return the slots of this replica's micro-batch ``number``, counted from 0 over the whole training."""
    samples, seed = stream.samples_of(number), stream.random_seed(number)
    surplus = [samples[0]] * (stream.micro_batch - len(samples))
    return [Slot(*sample, slot < len(samples), seed) for slot, sample in enumerate(samples + surplus)]


class TrainingColumns:
    """Fills the columns of training batches.

    Args:
        objects: objects of the training pictures.
        settings: sizes of pictures and columns.
        seed: seed of the mirroring.
        pin_memory: use pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(self, objects: TrainingObjects, settings: DataSettings, seed: int, pin_memory: bool) -> None:
        self._objects, self._settings, self._seed, self._pin = objects, settings, seed, pin_memory
        self._resized_P2 = resized_sizes(objects.size, settings.facts.min_size, settings.facts.max_size)

    def empty(self, pictures: int) -> dict[str, Tensor]:
        """Return the columns, filled with zeros.

        ``decoded_size`` (B, 2) int32 and ``size`` (B, 2) fp32, heights and widths before and after resizing, px;
        ``boxes`` (B, M, 4) fp32, px of the resized and mirrored picture, ``label`` (B, M) int64 from 1 and ``count``
        (B,) int64; ``object`` (B,) int64, index of the picture's first object among those of all pictures;
        ``transform`` (B, 4) fp32: scales of x and y, 1 if the picture is mirrored, and width of the published picture,
        px; ``real`` (B,) bool; ``seed`` (B,) int64.
        """
        return {
            **_empty_sizes(pictures, self._pin),
            **empty_boxes(pictures, self._settings.reader.max_boxes, self._pin),
            "object": torch.zeros(pictures, dtype=torch.int64, pin_memory=self._pin),
            "transform": torch.zeros((pictures, 4), pin_memory=self._pin),
            "real": torch.zeros(pictures, dtype=torch.bool, pin_memory=self._pin),
            "seed": torch.zeros(pictures, dtype=torch.int64, pin_memory=self._pin),
        }

    def put(self, tensors: dict[str, Tensor], number: int, slot: Slot) -> None:
        """Fill slot ``number`` of the columns of :meth:`empty`; if it is not real, only sizes, transform and seed."""
        objects, place = self._objects, slot.place
        (height, width), resized_2 = objects.size[place].tolist(), self._resized_P2[place]
        mirrored = self._settings.mirrors(self._seed, slot.epoch, place)
        transform_4 = np.array([resized_2[1] / width, resized_2[0] / height, mirrored, width], np.float32)
        tensors["decoded_size"].numpy()[number] = height, width
        tensors["size"].numpy()[number] = resized_2
        tensors["transform"].numpy()[number] = transform_4
        tensors["seed"].numpy()[number] = slot.seed
        if not slot.real:
            return
        mine = slice(objects.bounds[place], objects.bounds[place + 1])
        boxes_M4 = resized_boxes(objects.corners[mine], transform_4, int(resized_2[1]))
        put_boxes(tensors, number, boxes_M4, objects.label[mine])
        tensors["object"].numpy()[number] = objects.bounds[place]
        tensors["real"].numpy()[number] = True


def resized_boxes(corners_M4: NDArray[np.float32], transform_4: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Return corners (M, 4) in the resized and possibly mirrored picture, in the reference's fp32 arithmetic.

    The second corner of a box is its last pixel. Mirroring maps x to ``width - x - 1`` and swaps the corners.

    Args:
        corners_M4: corners in px of the published picture.
        transform_4: see :meth:`TrainingColumns.empty`.
        width: width of the resized picture, px.
    """
    resized_M4 = corners_M4 * transform_4[[0, 1, 0, 1]]
    if transform_4[2]:
        resized_M4[:, [0, 2]] = np.float32(width) - resized_M4[:, [2, 0]] - np.float32(1)
    return resized_M4


def evaluation_columns(
    annotations: Annotations, resized_P2: NDArray[np.int64], places: Sequence[int], batch: int, pin_memory: bool
) -> dict[str, Tensor]:
    """Return ``picture`` (B,) int64, ids, and ``decoded_size`` and ``size`` as in training.

    Unused slots are padding with id -1 and 1 x 1 px, so that no size is zero.

    Args:
        annotations: annotations of all pictures.
        resized_P2: heights and widths of all pictures after resizing.
        places: indices of at most ``batch`` pictures.
        batch: B.
        pin_memory: use pinned memory, for asynchronous copies to a GPU.
    """
    tensors = _empty_sizes(batch, pin_memory)
    chosen = np.asarray(places, np.int64)
    tensors["picture"] = torch.full((batch,), PADDING, dtype=torch.int64, pin_memory=pin_memory)
    tensors["picture"].numpy()[: len(chosen)] = annotations.picture_id[chosen]
    for name, height_P, width_P in (
        ("decoded_size", annotations.picture_height, annotations.picture_width),
        ("size", resized_P2[:, 0], resized_P2[:, 1]),
    ):
        column_B2 = tensors[name].numpy()
        column_B2[: len(chosen)] = np.stack([height_P[chosen], width_P[chosen]], 1)
        column_B2[len(chosen) :] = 1
    return tensors


def _empty_sizes(pictures: int, pin_memory: bool) -> dict[str, Tensor]:
    return {
        "decoded_size": torch.zeros((pictures, 2), dtype=torch.int32, pin_memory=pin_memory),
        "size": torch.zeros((pictures, 2), pin_memory=pin_memory),
    }
