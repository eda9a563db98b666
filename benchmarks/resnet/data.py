"""ResNet-50's data: batches of pictures from prepared RecordIO (see :mod:`benchmarks.resnet.prepare`).

A batch has ``image`` (N, C, H, W), normalised, in channels_last memory, with zeros in the channels after the third,
and ``label`` (N,) int64, where -1 marks padding in evaluation. DALI reads the records itself, in its own order
(:mod:`benchmarks.resnet.dali_reader`).

Shapes: N pictures, H x W pixels, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from benchmarks.resnet.config import CachedReaderConfig, Facts
from benchmarks.resnet.prepare import FORMAT, PREPARE_COMMAND
from common.data import manifest
from common.data.batches import DataSource, EvalSource
from common.data.manifest import Manifest
from common.data.order import sample_generator
from common.distributed.layout import Layout
from common.errors import DataError
from common.formats.recordio import ImageRecord, RecordReader
from common.nn.resnet import PADDED_CHANNELS
from common.vision.dali import choose_reader
from common.vision.pictures import (
    Columns,
    EvaluationSplit,
    Normalizer,
    Pictures,
    Sample,
    TrainingSplit,
    Transform,
    other_classes,
)
from common.vision.reader import PictureData, epoch_stream, eval_shard

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in px, in Pillow's order."""

_ATTEMPTS = 10
_VERIFY = "check the data with 'mlperf-suite verify benchmark=resnet'"


def random_crop_box(
    width: int, height: int, area: tuple[float, float], aspect: tuple[float, float], random: np.random.Generator
) -> Box:
    """Return a box with a random fraction of the area and a random aspect ratio (log-uniform), at a random position.

    After ten boxes that do not fit, return the largest centred box with the nearest allowed aspect ratio.

    Args:
        area: smallest and largest fraction of the picture's area.
        aspect: smallest and largest ratio of width to height.
    """
    for _ in range(_ATTEMPTS):
        pixels = width * height * random.uniform(*area)
        ratio = math.exp(random.uniform(math.log(aspect[0]), math.log(aspect[1])))
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(random.integers(0, width - w + 1)), int(random.integers(0, height - h + 1))
            return left, top, left + w, top + h
    ratio = min(max(width / height, aspect[0]), aspect[1])
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def train_pixels(picture: Image.Image, facts: Facts, random: np.random.Generator) -> NDArray[np.uint8]:
    """Crop at random, resize and mirror; return pixels (image_size, image_size, 3).

    Pillow's resize accepts a crop box, so that cropping and resizing are one call on 8-bit pixels.
    """
    box = random_crop_box(*picture.size, facts.crop_area, facts.crop_aspect, random)
    flip = random.random() < facts.mirror
    side = facts.image_size
    result = np.asarray(picture.resize((side, side), Image.Resampling.BILINEAR, box=box))
    return result[:, ::-1] if flip else result


def eval_pixels(picture: Image.Image, facts: Facts) -> NDArray[np.uint8]:
    """Resize the shorter side to ``eval_resize`` and crop the centre; return (image_size, image_size, 3).

    The longer side is rounded to the nearest integer, as in DALI, which NVIDIA's submissions use.
    """
    shorter, side = min(picture.size), facts.image_size
    width, height = ((2 * length * facts.eval_resize + shorter) // (2 * shorter) for length in picture.size)
    left, top = (width - side) // 2, (height - side) // 2
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + side, top + side)))


class Records(Pictures):
    """Labelled pictures of a record file.

    Raises:
        DataError: the records are missing, damaged, or differ in number.
    """

    def __init__(self, path: Path, expected: int) -> None:
        self.path, self._reader = path, RecordReader(path)
        if len(self._reader) != expected:
            self._reader.close()
            raise DataError(
                f"{path} has {len(self._reader)} records where {manifest.NAME} says {expected}; run '{PREPARE_COMMAND}'"
            )

    def record(self, index: int) -> ImageRecord:
        """Return the record with this index."""
        return self._reader.image(index)

    def describe(self, index: int) -> str:
        """Return file, record and offset, for messages."""
        return self._reader.describe(index)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


class Labels(Columns):
    """The labels of pictures, and the random numbers of their augmentation.

    Args:
        records: the pictures, for messages.
        classes: labels are 0, 1, ... ``classes - 1``.
        seed: seed of the augmentation; None for evaluation.
    """

    def __init__(self, records: Records, classes: int, seed: int | None = None) -> None:
        self._records, self._classes, self._seed = records, classes, seed

    def empty(self, samples: Sequence[Sample], slots: int, pin_memory: bool) -> dict[str, Tensor]:
        """Return ``label`` (slots,), int64, filled with -1."""
        return {"label": torch.full((slots,), -1, dtype=torch.int64, pin_memory=pin_memory)}

    def put(
        self, tensors: dict[str, Tensor], slot: int, sample: Sample, record: ImageRecord
    ) -> np.random.Generator | None:
        """Write the label to row ``slot``; return the random generator of a training picture, None in evaluation.

        Raises:
            DataError: the record has no label of a class.
        """
        label = int(record.labels[0]) if len(record.labels) == 1 else -1
        if not 0 <= label < self._classes:
            raise DataError(
                f"{self._records.describe(sample[1])}: label {record.labels} is not one of the {self._classes} "
                f"classes; {_VERIFY}"
            )
        tensors["label"][slot] = label
        return None if self._seed is None else sample_generator(self._seed, *sample)


class ResNetTransform(Transform):
    """Crops, resizes, mirrors and normalises."""

    def __init__(self, facts: Facts, dtype: torch.dtype) -> None:
        self._facts, self.dtype = facts, dtype
        self.shape = (facts.image_size, facts.image_size, PADDED_CHANNELS)
        self._normalizer = Normalizer(facts.mean, facts.std, dtype)

    def write(self, picture: Image.Image, augmentation: np.random.Generator | None, out_HWC: Tensor) -> None:
        """Write the transformed picture to ``out_HWC``; without ``augmentation`` as in evaluation."""
        facts = self._facts
        pixels = eval_pixels(picture, facts) if augmentation is None else train_pixels(picture, facts, augmentation)
        self._normalizer.write(pixels, out_HWC)


class ImageNet(PictureData[Facts, CachedReaderConfig]):
    """ResNet-50's data."""

    def build_transform(self) -> ResNetTransform:
        """Return the transform of the pixels."""
        return ResNetTransform(self.facts, self.dtype)

    def training(self, root: Path, layout: Layout, micro_batch: int, accumulation: int) -> TrainingSplit:
        """Open the training records."""
        found = self.read_manifest(root)
        stream = epoch_stream(found.counts["train_samples"], layout, micro_batch, accumulation)
        records = Records(root / "train.rec", stream.train_samples)
        columns = Labels(records, self.facts.classes, layout.seed)
        return TrainingSplit(records, columns, stream, found.counts["eval_samples"], found.synthetic)

    def validation(self, root: Path, layout: Layout, batch: int) -> EvaluationSplit:
        """Open the validation records."""
        shard = eval_shard(self.read_manifest(root).counts["eval_samples"], layout, batch)
        records = Records(root / "val.rec", shard.eval_samples)
        return EvaluationSplit(records, Labels(records, self.facts.classes), shard)

    def open_train(self, root: Path, layout: Layout, micro_batch: int, accumulation: int = 1) -> DataSource:
        """Open the training data; see :meth:`common.vision.reader.PictureData.open_train`."""
        if choose_reader(self.reader.reader) != "dali":
            return super().open_train(root, layout, micro_batch, accumulation)
        from benchmarks.resnet import dali_reader

        found = self.read_manifest(root)
        stream = epoch_stream(found.counts["train_samples"], layout, micro_batch, accumulation)
        counts = found.counts["eval_samples"], found.synthetic
        return dali_reader.train_source(root / "train.rec", self, stream, *counts, layout.device)

    def open_eval(self, root: Path, layout: Layout, batch: int) -> EvalSource:
        """Open the evaluation data; see :meth:`common.vision.reader.PictureData.open_eval`."""
        if choose_reader(self.reader.reader) != "dali":
            return super().open_eval(root, layout, batch)
        from benchmarks.resnet import dali_reader

        shard = eval_shard(self.read_manifest(root).counts["eval_samples"], layout, batch)
        return dali_reader.eval_source(root / "val.rec", self, shard, layout.device)

    def warm_up(self, layout: Layout, micro_batch: int) -> None:
        """Load and warm up DALI, if it is the reader."""
        if choose_reader(self.reader.reader) == "dali":
            from benchmarks.resnet import dali_reader

            dali_reader.warm_up(self, layout.device, micro_batch * self.reader.input_batch_multiplier)

    def read_manifest(self, root: Path) -> Manifest:
        """Return the manifest of ``root``.

        Raises:
            DataError: the manifest is missing, malformed, of another format, or has more classes than the model.
        """
        found = manifest.read(root, FORMAT, PREPARE_COMMAND, ("train_samples", "eval_samples", "classes"))
        if found.counts["classes"] > self.facts.classes:
            raise other_classes(root, found.counts["classes"], self.facts.classes)
        return found
