"""Reader for any machine: Pillow's decoder and resize with torchvision's transforms, in threads of this process.

The random numbers of a training picture depend only on (seed, epoch, sample). The stream of batches is therefore the
same for any number of threads and continues bit for bit from any position.

Shapes: B pictures, H x W pixels, C channels, M boxes at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from benchmarks.ssd300.annotated import AnnotatedPictures
from benchmarks.ssd300.augment import draw, eval_pixels, train_pixels
from benchmarks.ssd300.data_settings import DataSettings
from common.data.order import EpochStream, EvalShard, sample_generator
from common.data.pixels import Normalizer
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.detection.picture_boxes import empty_boxes, evaluation_columns, put_boxes
from common.nn.resnet import PADDED_CHANNELS


def train_source(
    pictures: AnnotatedPictures,
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
        DataError: while reading: a picture is unreadable or undecodable.
    """
    batches = _Batches(settings, pin_memory)
    room, side = settings.reader.max_boxes, settings.facts.image_size

    def begin(number: int) -> PendingBatch:
        samples = stream.samples_of(number)
        tensors = empty_boxes(len(samples), room, pin_memory)

        def pixels(slot: int) -> NDArray[np.uint8]:
            boxes_M4, label_M = pictures.boxes(samples[slot][1])
            random = sample_generator(stream.seed, *samples[slot])
            plan = draw(boxes_M4, settings.facts, settings.crop_attempts, random)
            put_boxes(tensors, slot, plan.boxes.astype(np.float32), label_M[plan.crop.kept])
            return train_pixels(pictures.picture(samples[slot][1]), plan, side)

        return batches.begin(len(samples), len(samples), pixels, tensors)

    return ThreadedTrainSource(stream, eval_samples, stand_in, batches.threads, begin, pictures.close)


def eval_source(
    pictures: AnnotatedPictures, settings: DataSettings, shard: EvalShard, pin_memory: bool = False
) -> ThreadedEvalSource:
    """Return the evaluation batches of one replica; padding has id -1. Raises like :func:`train_source`.

    Args:
        shard: samples and batch size of this replica.
        pin_memory: whether batches are in page-locked memory, for asynchronous copies to a GPU.
    """
    batches = _Batches(settings, pin_memory)

    def begin(places: Sequence[int]) -> PendingBatch:
        tensors = evaluation_columns(pictures.annotations, places, shard.batch, pin_memory)

        def pixels(slot: int) -> NDArray[np.uint8]:
            return eval_pixels(pictures.picture(places[slot]), settings.facts.image_size)

        return batches.begin(shard.batch, len(places), pixels, tensors)

    return ThreadedEvalSource(shard, batches.threads, begin, pictures.close)


class _Batches:
    """Builds batches of pictures in threads."""

    def __init__(self, settings: DataSettings, pin_memory: bool) -> None:
        self._settings, self._pin_memory = settings, pin_memory
        self._normalizer = Normalizer(settings.facts.mean, settings.facts.std, settings.dtype)
        Image.preinit()  # registers the decoders, which must not happen in several threads at once
        self.threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def begin(
        self, size: int, pictures: int, pixels: Callable[[int], NDArray[np.uint8]], tensors: dict[str, Tensor]
    ) -> PendingBatch:
        """Start a batch of ``size`` slots, with ``tensors``. ``pixels`` fills the first ``pictures`` slots."""
        side = self._settings.facts.image_size
        shape = (size, side, side, PADDED_CHANNELS)
        image_BHWC = torch.zeros(shape, dtype=self._settings.dtype, pin_memory=self._pin_memory)

        def fill(slot: int) -> None:
            self._normalizer.write(pixels(slot), image_BHWC[slot])

        return self.threads.begin({"image": image_BHWC.permute(0, 3, 1, 2), **tensors}, pictures, fill)
