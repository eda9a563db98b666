"""SSD300's data: batches from prepared pictures with boxes (see :mod:`benchmarks.ssd300.prepare`).

The prepared format has JPEG records, and annotation columns in the same order. Batches of training and evaluation have
``image`` (B, C, H, W), normalised, in channels_last memory, with zeros in the channels after the third. A training
batch also has ``boxes`` (B, M, 4) fp32, corners x1, y1, x2, y2 as fractions of the picture, ``label`` (B, M) int64,
classes from 1, and ``count`` (B,) int64, the number of boxes; unused slots are 0. An evaluation batch also has the
columns of :class:`common.detection.picture_boxes.EvaluationColumns`.

DALI changes brightness, contrast, saturation and hue in its own order, and contrast around middle grey, as in NVIDIA's
submissions.

Shapes: P pictures, M boxes of one picture, B pictures of a batch.
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

from benchmarks.ssd300.augment import CHANGES, Augmentation, draw, eval_pixels, train_pixels
from benchmarks.ssd300.config import Facts
from common.data import manifest
from common.data.manifest import Manifest
from common.data.order import sample_generator
from common.data.ragged import bounds_of
from common.detection.annotations import Annotations
from common.detection.coco_pictures import SPLITS, CocoPictures, prepare_command
from common.detection.config import BoxReaderConfig
from common.detection.picture_boxes import BoxColumns, EvaluationColumns, put_boxes, require_capacity
from common.distributed.layout import Layout
from common.formats.recordio import ImageRecord
from common.nn.resnet import PADDED_CHANNELS
from common.vision.dali import normalized
from common.vision.pictures import EvaluationSplit, Normalizer, Sample, TrainingSplit, Transform, other_classes
from common.vision.reader import PictureData, epoch_stream, eval_shard

BENCHMARK = "ssd300"
FORMAT = "coco-boxes/1"
PREPARE_COMMAND = prepare_command(BENCHMARK)
COUNTS = ("train_samples", "eval_samples", "classes", "train_boxes", "val_boxes")


def read_annotations(root: Path, split: str, found: Manifest) -> Annotations:
    """Read the columns of a split. Columns that are damaged or do not fit the manifest raise :class:`DataError`."""
    counts = found.counts
    return Annotations.read(root / split, counts[SPLITS[split]], counts["classes"], counts[f"{split}_boxes"])


class AnnotatedPictures(CocoPictures):
    """Pictures of a split and their boxes, by index.

    Args:
        split: ``train`` or ``val``.

    Raises:
        DataError: records or columns are missing, damaged, or differ in number.
    """

    def __init__(self, root: Path, split: str, found: Manifest) -> None:
        super().__init__(root / f"{split}.rec", read_annotations(root, split, found), BENCHMARK)
        self._shares_N4, self._label_N, self._bounds = _by_picture(self.annotations)

    def boxes(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return (M, 4) corners as fractions of the picture and (M,) classes, from 1 in the order of the class ids."""
        rows = slice(self._bounds[index], self._bounds[index + 1])
        return self._shares_N4[rows], self._label_N[rows]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of boxes of each picture, (P,)."""
        return np.diff(self._bounds)


def _by_picture(
    annotations: Annotations,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return corners as fractions and classes from 1, sorted by picture, and the bounds of each picture in them."""
    index_N = annotations.picture_indices()
    order_N = np.argsort(index_N, kind="stable")
    index_N = index_N[order_N]
    x, y, width, height = annotations.box_xywh[order_N].T
    corners_N4 = np.stack([x, y, x + width, y + height], axis=1)
    sides_N2 = np.stack([annotations.picture_width[index_N], annotations.picture_height[index_N]], axis=1)
    counts_P = np.bincount(index_N, minlength=len(annotations.picture_id))
    return corners_N4 / np.tile(sides_N2, (1, 2)), annotations.labels()[order_N], bounds_of(counts_P)


class AugmentedBoxes(BoxColumns):
    """Draws the augmentation of training pictures, and fills the columns with their boxes.

    Args:
        facts: ranges of the augmentation.
        attempts: attempts per kind of crop.
        capacity: capacity of a batch, in boxes per picture.
    """

    def __init__(self, pictures: AnnotatedPictures, facts: Facts, attempts: int, capacity: int, seed: int) -> None:
        super().__init__(capacity)
        self._pictures, self._facts, self._attempts, self._seed = pictures, facts, attempts, seed

    def put(self, tensors: dict[str, Tensor], slot: int, sample: Sample, record: ImageRecord) -> Augmentation:
        """Write the boxes that the crop keeps to row ``slot``, and return the augmentation. ``record`` is not used."""
        epoch, index = sample
        boxes_M4, label_M = self._pictures.boxes(index)
        plan = draw(boxes_M4, self._facts, self._attempts, sample_generator(self._seed, epoch, index))
        put_boxes(tensors, slot, plan.boxes.astype(np.float32), label_M[plan.crop.kept])
        return plan


class Ssd300Transform(Transform):
    """Crops, resizes, changes colours, mirrors and normalises; in evaluation, only resizes and normalises.

    ``neutral`` has left, top, width and height of the crop as fractions, mirror flag, factors of brightness, contrast
    and saturation, and hue shift in degrees.
    """

    neutral = (0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0)
    largest = (640, 640)  # px, of COCO
    padding_bytes = 16 << 20

    def __init__(self, facts: Facts, dtype: torch.dtype) -> None:
        self._facts, self.dtype = facts, dtype
        self.shape = (facts.image_size, facts.image_size, PADDED_CHANNELS)
        self._normalizer = Normalizer(facts.mean, facts.std, dtype)

    def write(self, picture: Image.Image, augmentation: Augmentation | None, out_HWC: Tensor) -> None:
        """Write the transformed picture to ``out_HWC``; without ``augmentation`` as in evaluation."""
        side = self._facts.image_size
        pixels = eval_pixels(picture, side) if augmentation is None else train_pixels(picture, augmentation, side)
        self._normalizer.write(pixels, out_HWC)

    def numbers(self, augmentation: Augmentation, width: int, height: int) -> Sequence[float]:
        """Return DALI's inputs for a picture of ``width`` x ``height`` px, in the order of ``neutral``."""
        left, top, right, bottom = augmentation.crop.pixels(width, height)
        # These are fractions for whole pixels, so that DALI's rounding gives the same crop as Pillow's.
        crop = (left / width, top / height, (right - left) / width, (bottom - top) / height)
        brightness, contrast, saturation, hue = (augmentation.amount(change) for change in CHANGES)
        return (*crop, float(augmentation.flip), brightness, contrast, saturation, 360 * hue)

    def graph(self, dali: Any, picture: Any, numbers: Any) -> Any:
        """Return the DALI node; without ``numbers`` that of evaluation."""
        fn, size = dali.fn, self._facts.image_size
        mirror: Any = 0
        if numbers is not None:
            fractions = {"normalized_anchor": True, "normalized_shape": True}
            picture = fn.slice(picture, numbers[0:2], numbers[2:4], axis_names="WH", **fractions)
            mirror = fn.cast(numbers[4], dtype=dali.types.INT32)
        # Bilinear with an antialiasing (triangular) filter, as in Pillow
        picture = fn.resize(picture, size=[size, size], interp_type=dali.types.INTERP_LINEAR, antialias=True)
        if numbers is not None:
            picture = fn.color_twist(
                picture, brightness=numbers[5], contrast=numbers[6], saturation=numbers[7], hue=numbers[8]
            )
        return normalized(picture, size, self._facts.mean, self._facts.std, self.dtype, mirror, pad_output=True)


class Ssd300Data(PictureData[Facts, BoxReaderConfig]):
    """SSD300's data.

    Args:
        crop_attempts: attempts per kind of crop.
    """

    def __init__(self, facts: Facts, reader: BoxReaderConfig, dtype: torch.dtype, crop_attempts: int) -> None:
        super().__init__(facts, reader, dtype)
        self._crop_attempts = crop_attempts

    def build_transform(self) -> Ssd300Transform:
        """Return the transform of the pixels."""
        return Ssd300Transform(self.facts, self.dtype)

    def training(self, root: Path, layout: Layout, micro_batch: int, accumulation: int) -> TrainingSplit:
        """Open the training pictures and boxes."""
        found = self.read_manifest(root)
        stream = epoch_stream(found.counts["train_samples"], layout, micro_batch, accumulation)
        pictures = AnnotatedPictures(root, "train", found)
        require_capacity(pictures.counts, self.reader.max_boxes, pictures)
        columns = AugmentedBoxes(pictures, self.facts, self._crop_attempts, self.reader.max_boxes, layout.seed)
        return TrainingSplit(pictures, columns, stream, found.counts["eval_samples"], found.synthetic)

    def validation(self, root: Path, layout: Layout, batch: int) -> EvaluationSplit:
        """Open the validation pictures."""
        found = self.read_manifest(root)
        pictures, shard = AnnotatedPictures(root, "val", found), eval_shard(found.counts["eval_samples"], layout, batch)
        return EvaluationSplit(pictures, EvaluationColumns(pictures.annotations), shard)

    def category_ids(self, root: Path) -> list[int]:
        """Return the class ids in the data under ``root``, in the order of the classes."""
        found: list[int] = read_annotations(root, "val", self.read_manifest(root)).class_id.tolist()
        return found

    def read_manifest(self, root: Path) -> Manifest:
        """Return the manifest of ``root``.

        Raises:
            DataError: the manifest is missing, malformed, of another format, or has another number of classes.
        """
        found = manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS)
        if found.counts["classes"] != self.facts.classes:
            raise other_classes(root, found.counts["classes"], self.facts.classes)
        return found


def ground_truth(root: Path) -> Annotations:
    """Return the boxes of the evaluation set under ``root``; damaged files raise :class:`DataError`."""
    return read_annotations(root, "val", manifest.read(root, FORMAT, PREPARE_COMMAND, COUNTS))
