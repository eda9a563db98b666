"""RetinaNet's data: batches from prepared pictures and boxes (see :mod:`benchmarks.retinanet.prepare`).

Batches of training and evaluation have ``image`` (B, 3, S, S), normalised, in channels_last memory. A training batch
also has ``boxes`` (B, M, 4) fp32, corners in px of the resized picture, ``label`` (B, M) int64, and ``count`` (B,)
int64, the number of boxes per picture; unused slots are 0. An evaluation batch also has the columns of
:class:`common.detection.picture_boxes.EvaluationColumns`.

Shapes: B pictures, M boxes of one picture, H x W pixels, S x S after resizing, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from benchmarks.retinanet.config import Facts
from benchmarks.retinanet.prepared import LABELS, Prepared, Split, open_prepared
from common.detection.annotations import Annotations
from common.detection.config import BoxReaderConfig
from common.detection.picture_boxes import (
    BoxColumns,
    EvaluationColumns,
    PictureBoxes,
    put_boxes,
    require_capacity,
)
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats.recordio import ImageRecord
from common.vision.dali import normalized
from common.vision.pictures import EvaluationSplit, Sample, TrainingSplit, Transform, mirrored, other_classes
from common.vision.reader import PictureData, epoch_stream, eval_shard


def resized_pixels(picture: Image.Image, size: int, mirror: bool) -> Tensor:
    """Resize an RGB picture bilinearly, mirrored if requested: (size, size, 3), fp32 levels of 0 to 255."""
    pixels_HWC = np.array(picture)
    if mirror:
        pixels_HWC = pixels_HWC[:, ::-1].copy()
    pixels_CHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1).float()
    resized_1CSS = F.interpolate(pixels_CHW[None], (size, size), mode="bilinear", align_corners=False, antialias=False)
    return resized_1CSS[0].permute(1, 2, 0)


class MirroredBoxes(BoxColumns):
    """Draws which training pictures are mirrored, and fills the columns with their boxes."""

    def __init__(self, boxes: PictureBoxes, facts: Facts, capacity: int, seed: int) -> None:
        super().__init__(capacity)
        self._boxes, self._facts, self._seed = boxes, facts, seed

    def put(self, tensors: dict[str, Tensor], slot: int, sample: Sample, record: ImageRecord) -> bool:
        """Write the boxes of a picture to row ``slot``, and return whether it is mirrored."""
        epoch, index = sample
        size, mirror = self._facts.image_size, mirrored(self._facts.mirror, self._seed, epoch, index)
        put_boxes(tensors, slot, *self._boxes.resized(index, size, size, mirror))
        return mirror


class RetinaNetTransform(Transform):
    """Mirrors, resizes and normalises. As in the reference, resizing has no antialiasing and does not round pixels."""

    neutral = (0.0,)
    largest = (7360, 7360)  # px, as in NVIDIA's submissions
    padding_bytes = 64 << 20

    def __init__(self, facts: Facts, dtype: torch.dtype) -> None:
        self._facts, self.dtype = facts, dtype
        self.shape = (facts.image_size, facts.image_size, 3)
        self._mean_C, self._std_C = torch.tensor(facts.mean), torch.tensor(facts.std)

    def write(self, picture: Image.Image, augmentation: bool | None, out_HWC: Tensor) -> None:
        """Write the transformed picture to ``out_HWC``, mirrored if ``augmentation``."""
        pixels_SSC = resized_pixels(picture, self._facts.image_size, bool(augmentation))
        out_HWC.copy_((pixels_SSC - self._mean_C) / self._std_C)

    def numbers(self, augmentation: bool, width: int, height: int) -> Sequence[float]:
        """Return (1.0,) for a picture that is mirrored (``augmentation``), and (0.0,) for others."""
        return (float(augmentation),)

    def graph(self, dali: Any, picture: Any, numbers: Any) -> Any:
        """Return the DALI node; without ``numbers`` that of evaluation."""
        fn, types, size = dali.fn, dali.types, self._facts.image_size
        resized = fn.resize(
            picture, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=False, dtype=types.FLOAT
        )
        mirror = 0 if numbers is None else fn.cast(numbers[0], dtype=types.INT32)
        return normalized(resized, size, self._facts.mean, self._facts.std, self.dtype, mirror)


class RetinaNetData(PictureData[Facts, BoxReaderConfig]):
    """RetinaNet's data: our prepared format, or a folder of the reference's script."""

    def build_transform(self) -> RetinaNetTransform:
        """Return the transform of the pixels."""
        return RetinaNetTransform(self.facts, self.dtype)

    def training(self, root: Path, layout: Layout, micro_batch: int, accumulation: int) -> TrainingSplit:
        """Open the training pictures and boxes."""
        prepared, capacity = open_prepared(root), self.reader.max_boxes
        split = self._open_split(prepared, "train")
        boxes = PictureBoxes.of(split.annotations)
        require_capacity(boxes.counts, capacity, split)
        stream = epoch_stream(len(split), layout, micro_batch, accumulation)
        columns = MirroredBoxes(boxes, self.facts, capacity, layout.seed)
        return TrainingSplit(split, columns, stream, prepared.samples("eval"), prepared.synthetic)

    def validation(self, root: Path, layout: Layout, batch: int) -> EvaluationSplit:
        """Open the validation pictures."""
        split = self._open_split(open_prepared(root), "eval")
        return EvaluationSplit(split, EvaluationColumns(split.annotations), eval_shard(len(split), layout, batch))

    def _open_split(self, prepared: Prepared, name: str) -> Split:
        split = prepared.split(name)
        classes = len(split.annotations.class_id)
        if classes > self.facts.classes:
            raise other_classes(prepared.root, classes, self.facts.classes)
        if not len(split):
            raise DataError(f"{split.path.parent / LABELS} has no pictures")
        return split


def ground_truth(root: Path) -> Annotations:
    """Return the boxes with which detections are compared in evaluation. Call it after ``run_start``.

    Raises:
        DataError: files are missing or damaged.
    """
    return open_prepared(root).split("eval").annotations
