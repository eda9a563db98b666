"""Mask R-CNN's data: batches from prepared pictures with masks (see :mod:`benchmarks.maskrcnn.prepared`).

A batch has the padded height and width as key. It has ``pixels`` (B, S, S, 3) uint8, decoded pictures at the top left
of slots of ``facts.longest_side`` px, red first, and the columns of :class:`TrainingColumns` or
:class:`EvaluationColumns`. :class:`benchmarks.maskrcnn.pictures.Preparer` computes the network's input from them on
the device.

Legend: B slots of a batch, S side of a slot, M slots for objects of a picture, P pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from benchmarks.maskrcnn.config import Facts, MaskReaderConfig
from benchmarks.maskrcnn.pictures import PaddedShapes, orientation, resized_sizes
from benchmarks.maskrcnn.prepared import Prepared, TrainingObjects, open_prepared
from common.data.batches import EvalSource
from common.data.order import GroupedShard, GroupedStream, MicroBatches, SampleStream
from common.detection.annotations import Annotations
from common.detection.picture_boxes import empty_boxes, put_boxes, require_capacity
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats.recordio import ImageRecord
from common.vision.pictures import (
    Columns,
    EvaluationSplit,
    Pictures,
    Sample,
    TrainingSplit,
    Transform,
    mirrored,
    other_classes,
)
from common.vision.reader import CachedSource, PictureData

PADDING = -1
"""Picture id of padding."""


class TrainingColumns(Columns):
    """Columns of training batches.

    ``decoded_size`` (B, 2) int32 and ``size`` (B, 2) fp32, heights and widths before and after resizing, px; ``boxes``
    (B, M, 4) fp32, px of the resized and mirrored picture, ``label`` (B, M) int64 from 1 and ``count`` (B,) int64;
    ``object`` (B,) int64, index of the picture's first object among those of all pictures; ``transform`` (B, 4) fp32:
    scales of x and y, 1 if the picture is mirrored, and width of the published picture, px; ``real`` (B,) bool, False
    for slots of an incomplete batch that only repeat the first picture; ``seed`` (1,) int64.

    Args:
        stream: this replica's micro-batches, and the seed of the mirroring.
    """

    def __init__(self, objects: TrainingObjects, facts: Facts, stream: GroupedStream, capacity: int) -> None:
        self._objects, self._facts, self._stream, self._capacity = objects, facts, stream, capacity
        self._resized_P2 = resized_sizes(objects.size, facts.min_size, facts.max_size)

    def samples(self, stream: SampleStream, number: int) -> Sequence[Sample]:
        """Return (epoch, picture, whether the slot is real, seed of the batch) of each slot of a micro-batch."""
        samples, seed = stream.samples_of(number), self._stream.random_seed(number)
        surplus = [samples[0]] * (stream.micro_batch - len(samples))
        return [(*sample, slot < len(samples), seed) for slot, sample in enumerate(samples + surplus)]

    def empty(self, samples: Sequence[Sample], slots: int, pin_memory: bool) -> dict[str, Tensor]:
        """Return the columns, filled with zeros, with one seed per slot."""
        return {
            **_empty_sizes(slots, pin_memory),
            **empty_boxes(slots, self._capacity, pin_memory),
            "object": torch.zeros(slots, dtype=torch.int64, pin_memory=pin_memory),
            "transform": torch.zeros((slots, 4), pin_memory=pin_memory),
            "real": torch.zeros(slots, dtype=torch.bool, pin_memory=pin_memory),
            "seed": torch.zeros(slots, dtype=torch.int64, pin_memory=pin_memory),
        }

    def put(self, tensors: dict[str, Tensor], slot: int, sample: Sample, record: ImageRecord) -> None:
        """Write the columns of a sample to row ``slot``. ``record`` is not used.

        Rows that only repeat the first picture get no boxes, label, count or object index.
        """
        objects, (epoch, index, real, seed) = self._objects, sample
        (height, width), resized_2 = objects.size[index].tolist(), self._resized_P2[index]
        mirror = mirrored(self._facts.mirror, self._stream.seed, epoch, index)
        transform_4 = np.array([resized_2[1] / width, resized_2[0] / height, mirror, width], np.float32)
        tensors["decoded_size"].numpy()[slot] = height, width
        tensors["size"].numpy()[slot] = resized_2
        tensors["transform"].numpy()[slot] = transform_4
        tensors["seed"].numpy()[slot] = seed
        if not real:
            return
        rows = slice(objects.bounds[index], objects.bounds[index + 1])
        boxes_M4 = resized_boxes(objects.corners[rows], transform_4, int(resized_2[1]))
        put_boxes(tensors, slot, boxes_M4, objects.label[rows])
        tensors["object"].numpy()[slot] = objects.bounds[index]
        tensors["real"].numpy()[slot] = True


def resized_boxes(corners_M4: NDArray[np.float32], transform_4: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Return corners (M, 4) in the resized and possibly mirrored picture, in the reference's fp32 arithmetic.

    The second corner of a box is its last pixel. Mirroring maps x to ``width - x - 1`` and swaps the corners.

    Args:
        corners_M4: corners in px of the published picture.
        width: width of the resized picture, px.
    """
    resized_M4 = corners_M4 * transform_4[[0, 1, 0, 1]]
    if transform_4[2]:
        resized_M4[:, [0, 2]] = np.float32(width) - resized_M4[:, [2, 0]] - np.float32(1)
    return resized_M4


class EvaluationColumns(Columns):
    """Columns of evaluation batches: ``picture`` (B,) int64, ids, and ``decoded_size`` and ``size`` as in training.

    Padding has id -1 and 1 x 1 px, so that no size is zero.

    Args:
        resized_P2: heights and widths of all pictures after resizing.
    """

    def __init__(self, annotations: Annotations, resized_P2: NDArray[np.int64]) -> None:
        self._annotations, self._resized_P2 = annotations, resized_P2

    def empty(self, samples: Sequence[Sample], slots: int, pin_memory: bool) -> dict[str, Tensor]:
        """Return the columns, complete: ids and sizes of ``samples``, then padding up to ``slots``."""
        annotations, tensors = self._annotations, _empty_sizes(slots, pin_memory)
        chosen = np.array([sample[1] for sample in samples], np.int64)
        tensors["picture"] = torch.full((slots,), PADDING, dtype=torch.int64, pin_memory=pin_memory)
        tensors["picture"].numpy()[: len(chosen)] = annotations.picture_id[chosen]
        for name, height_P, width_P in (
            ("decoded_size", annotations.picture_height, annotations.picture_width),
            ("size", self._resized_P2[:, 0], self._resized_P2[:, 1]),
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


class DecodedPixels(Transform):
    """Only decodes, to the top left of slots of ``side`` px; everything else runs on the device."""

    dtype = torch.uint8
    padding_bytes = 16 << 20

    def __init__(self, side: int) -> None:
        self.shape, self.largest = (side, side, 3), (side, side)

    def write(self, picture: Image.Image, augmentation: None, out_HWC: Tensor) -> None:
        """Copy a decoded picture to the top left of ``out_HWC``; the rest stays unchanged."""
        out_HWC.numpy()[: picture.height, : picture.width] = np.asarray(picture)

    def graph(self, dali: Any, picture: Any, numbers: Any) -> Any:
        """Return the DALI node that pads ``picture`` with zeros to the largest size; ``numbers`` is not used."""
        return dali.fn.pad(picture, axes=[0, 1], shape=list(self.largest), fill_value=0)

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename ``image`` to ``pixels``, and keep one seed, because all pictures of a micro-batch have the same."""
        columns = {name: tensor[:1] if name == "seed" else tensor for name, tensor in tensors.items()}
        return {"pixels": columns.pop("image"), **columns}


class MaskData(PictureData[Facts, MaskReaderConfig]):
    """Mask R-CNN's data.

    A micro-batch of training has either only pictures that are wider than high or only others. A batch of evaluation
    has only pictures with the same smallest padded shape.
    """

    def build_transform(self) -> DecodedPixels:
        """Return the transform of the pixels."""
        return DecodedPixels(self.facts.longest_side)

    def training(self, root: Path, layout: Layout, micro_batch: int, accumulation: int) -> TrainingSplit:
        """Open the training pictures and objects."""
        prepared, capacity = self.read_prepared(root), self.reader.max_boxes
        pictures, objects = prepared.train()
        require_capacity(objects.counts, capacity, pictures)
        shapes, group_P = self._padded_shapes(objects.size, pictures), orientation(objects.size)
        try:
            shapes.require_common(group_P)
        except DataError:
            pictures.close()
            raise
        micro_batches = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
        stream = GroupedStream(group_P, micro_batches, layout.seed, shapes.of)
        columns = TrainingColumns(objects, self.facts, stream, capacity)
        return TrainingSplit(pictures, columns, stream, prepared.samples("val"), prepared.synthetic)

    def validation(self, root: Path, layout: Layout, batch: int) -> EvaluationSplit:
        """Open the validation pictures."""
        pictures = self.read_prepared(root).validation()
        annotations = pictures.annotations
        size_P2 = np.stack([annotations.picture_height, annotations.picture_width], 1)
        shapes = self._padded_shapes(size_P2, pictures)
        keys = [shapes.of([index]) for index in range(len(pictures))]
        shard = GroupedShard(keys, batch, layout.size("dp"), layout.index("dp"))
        resized_P2 = resized_sizes(size_P2, self.facts.min_size, self.facts.max_size)
        return EvaluationSplit(pictures, EvaluationColumns(annotations, resized_P2), shard)

    def open_eval(self, root: Path, layout: Layout, batch: int) -> EvalSource:
        """Open the evaluation data; the first evaluation decodes the pictures, and later ones use the same batches."""
        return CachedSource(super().open_eval(root, layout, batch), layout.device)

    def category_ids(self, root: Path) -> list[int]:
        """Return COCO's category ids of the classes 1, 2, 3 ..."""
        return open_prepared(root).category_ids()

    def read_prepared(self, root: Path) -> Prepared:
        """Return the prepared data under ``root``.

        Raises:
            DataError: the manifest is missing, malformed, of another format, or has another number of classes.
        """
        prepared = open_prepared(root)
        classes = prepared.manifest.counts["classes"]
        if classes != self.facts.classes:
            raise other_classes(root, classes, self.facts.classes)
        return prepared

    def _padded_shapes(self, size_P2: NDArray[np.int64], pictures: Pictures) -> PaddedShapes:
        """Return the padded shapes for pictures of these published sizes.

        Raises:
            DataError: a picture is larger than its slot, or fits no shape after resizing.
        """
        facts, longest = self.facts, int(size_P2.max(1).argmax())
        try:
            if size_P2[longest].max() > facts.longest_side:
                raise DataError(
                    f"{pictures.describe(longest)} has a side of {size_P2[longest].max()} px, and a slot holds at most "
                    f"facts.longest_side={facts.longest_side}"
                )
            resized_P2 = resized_sizes(size_P2, facts.min_size, facts.max_size)
            return PaddedShapes(self.reader.shapes, resized_P2, pictures.describe)
        except DataError:
            pictures.close()
            raise
