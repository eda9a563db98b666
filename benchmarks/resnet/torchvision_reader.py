"""Reader for any machine: torchvision's transforms on Pillow pictures, in threads of this process.

The code calls Pillow directly, as torchvision's own transforms do: Pillow's resize accepts a crop box, so that
cropping and resizing are one call on 8-bit pixels. (``torchvision.io.decode_jpeg`` is deprecated since torchvision
0.29.)

The random numbers of a training picture depend only on (seed, epoch, sample). The stream of batches is therefore the
same for any number of threads and continues bit for bit from any position. Decoding and resizing release the GIL.

Shapes: N pictures, H x W pixels, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks.resnet.data_settings import DataSettings
from common.data.order import EpochStream, EvalShard, sample_generator
from common.data.pixels import Normalizer
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.errors import DataError
from common.formats.jpeg import REMEDY, decode
from common.formats.recordio import ImageRecord, RecordReader
from common.nn.resnet import PADDED_CHANNELS

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


def train_pixels(data: bytes, settings: DataSettings, random: np.random.Generator) -> NDArray[np.uint8]:
    """Decode, crop at random, resize and mirror; return pixels (image_size, image_size, 3)."""
    picture = decode(data)
    box = random_crop_box(*picture.size, settings.facts.crop_area, settings.facts.crop_aspect, random)
    flip = random.random() < settings.facts.mirror
    side = settings.facts.image_size
    result = np.asarray(picture.resize((side, side), Image.Resampling.BILINEAR, box=box))
    return result[:, ::-1] if flip else result


def eval_pixels(data: bytes, settings: DataSettings) -> NDArray[np.uint8]:
    """Decode, resize the shorter side to ``eval_resize`` and crop the centre; return (image_size, image_size, 3).

    The longer side is rounded to the nearest integer, as in DALI, which NVIDIA's submissions use.
    """
    picture = decode(data)
    shorter = min(picture.size)
    width, height = ((2 * side * settings.facts.eval_resize + shorter) // (2 * shorter) for side in picture.size)
    side = settings.facts.image_size
    left, top = (width - side) // 2, (height - side) // 2
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + side, top + side)))


class _Pictures:
    """Builds batches of pictures from records."""

    def __init__(self, settings: DataSettings, reader: RecordReader, pin_memory: bool) -> None:
        self._settings, self._reader, self._pin_memory = settings, reader, pin_memory
        self._normalizer = Normalizer(settings.facts.mean, settings.facts.std, settings.dtype)
        Image.preinit()  # registers the decoders, which must not happen in several threads at once
        self.threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def begin(
        self, size: int, positions: Sequence[int], pixels: Callable[[int, bytes], NDArray[np.uint8]]
    ) -> PendingBatch:
        """Start a batch of ``size`` pictures from the records at ``positions``.

        Slots after the last position are padding with label -1. ``pixels`` maps a slot and its encoded bytes to
        pixels.
        """
        shape = (size, self._settings.facts.image_size, self._settings.facts.image_size, PADDED_CHANNELS)
        image_NHWC = torch.zeros(shape, dtype=self._settings.dtype, pin_memory=self._pin_memory)
        labels = torch.full((size,), -1, dtype=torch.int64, pin_memory=self._pin_memory)

        def fill(slot: int) -> None:
            position = positions[slot]
            record = self._reader.image(position)
            labels[slot] = self._label(record, position)
            try:
                made = pixels(slot, record.data)
            except ValueError as error:
                place = self._reader.describe(position)
                raise DataError(f"{place}: the picture cannot be decoded: {error}; {REMEDY}") from error
            self._normalizer.write(made, image_NHWC[slot])

        tensors = {"image": image_NHWC.permute(0, 3, 1, 2), "label": labels}
        return self.threads.begin(tensors, len(positions), fill)

    def _label(self, record: ImageRecord, position: int) -> int:
        label = int(record.labels[0]) if len(record.labels) == 1 else -1
        if not 0 <= label < self._settings.facts.classes:
            raise DataError(
                f"{self._reader.describe(position)}: label {record.labels} is not one of the "
                f"{self._settings.facts.classes} classes; {_VERIFY}"
            )
        return label


def train_source(
    reader: RecordReader,
    settings: DataSettings,
    stream: EpochStream,
    eval_samples: int,
    stand_in: bool,
    pin_memory: bool = False,
) -> ThreadedTrainSource:
    """Return the training batches of one replica.

    Args:
        stream: order of the samples of this replica.
        eval_samples: size of the evaluation set.
        stand_in: whether the data are synthetic.
        pin_memory: whether batches are in page-locked memory, for asynchronous copies to a GPU.

    Raises:
        DataError: while reading: a record is damaged or undecodable.
    """
    pictures = _Pictures(settings, reader, pin_memory)

    def begin(number: int) -> PendingBatch:
        samples = stream.samples_of(number)

        def pixels(slot: int, data: bytes) -> NDArray[np.uint8]:
            return train_pixels(data, settings, sample_generator(stream.seed, *samples[slot]))

        return pictures.begin(stream.micro_batch, [sample for _, sample in samples], pixels)

    return ThreadedTrainSource(stream, eval_samples, stand_in, pictures.threads, begin, reader.close)


def eval_source(
    reader: RecordReader, settings: DataSettings, shard: EvalShard, pin_memory: bool = False
) -> ThreadedEvalSource:
    """Return the evaluation batches of one replica; padding has label -1. Raises like :func:`train_source`.

    Args:
        shard: samples and batch size of this replica.
        pin_memory: whether batches are in page-locked memory, for asynchronous copies to a GPU.
    """
    pictures = _Pictures(settings, reader, pin_memory)

    def begin(positions: Sequence[int]) -> PendingBatch:
        return pictures.begin(shard.batch, positions, lambda slot, data: eval_pixels(data, settings))

    return ThreadedEvalSource(shard, pictures.threads, begin, reader.close)
