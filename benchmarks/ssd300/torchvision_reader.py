"""The reader that runs anywhere: Pillow's decoder and resize with torchvision's transforms, in threads of this process.

The random numbers of a training picture depend on (seed, epoch, sample) alone, so that the stream of batches is the
same whatever the number of threads, and continues bit for bit from any position.

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


def train_source(
    pictures: AnnotatedPictures,
    settings: DataSettings,
    stream: EpochStream,
    eval_samples: int,
    stand_in: bool,
    pin_memory: bool = False,
) -> ThreadedTrainSource:
    """Training batches of one replica; a picture that cannot be read or decoded is a :class:`DataError`."""
    batches = _Batches(settings, pin_memory)
    room, side = settings.reader.max_boxes, settings.facts.image_size

    def begin(samples: list[tuple[int, int]]) -> PendingBatch:
        tensors = {
            "boxes": batches.zeros((len(samples), room, 4), torch.float32),
            "label": batches.zeros((len(samples), room), torch.int64),
            "count": batches.zeros((len(samples),), torch.int64),
        }

        def pixels(slot: int) -> NDArray[np.uint8]:
            boxes_M4, label_M = pictures.boxes(samples[slot][1])
            random = sample_generator(stream.seed, *samples[slot])
            plan = draw(boxes_M4, settings.facts, settings.crop_attempts, random)
            count = write_boxes(plan.boxes, label_M[plan.crop.kept], tensors["boxes"][slot], tensors["label"][slot])
            tensors["count"][slot] = count
            return train_pixels(pictures.picture(samples[slot][1]), plan, side)

        return batches.begin(len(samples), len(samples), pixels, tensors)

    return ThreadedTrainSource(stream, eval_samples, stand_in, batches.threads, begin, pictures.close)


def eval_source(
    pictures: AnnotatedPictures, settings: DataSettings, shard: EvalShard, pin_memory: bool = False
) -> ThreadedEvalSource:
    """Evaluation batches of one replica; padding at their end has the id -1. Raises as training does."""
    batches = _Batches(settings, pin_memory)

    def begin(places: Sequence[int]) -> PendingBatch:
        tensors = evaluation_tensors(pictures, places, shard.batch)
        if pin_memory:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}

        def pixels(slot: int) -> NDArray[np.uint8]:
            return eval_pixels(pictures.picture(places[slot]), settings.facts.image_size)

        return batches.begin(shard.batch, len(places), pixels, tensors)

    return ThreadedEvalSource(shard, batches.threads, begin, pictures.close)


def write_boxes(
    boxes_M4: NDArray[np.float64], label_M: NDArray[np.int64], out_M4: Tensor, out_M: Tensor
) -> int:
    """Write boxes and classes to the first rows of a slot; returns how many."""
    count = len(boxes_M4)
    out_M4[:count] = torch.from_numpy(boxes_M4)
    out_M[:count] = torch.from_numpy(label_M)
    return count


def evaluation_tensors(pictures: AnnotatedPictures, places: Sequence[int], batch: int) -> dict[str, Tensor]:
    """``picture`` and ``size`` of an evaluation batch, padded."""
    found, mine = pictures.annotations, list(places)
    picture_B = torch.full((batch,), -1, dtype=torch.int64)
    size_B2 = torch.ones((batch, 2), dtype=torch.float32)
    picture_B[: len(mine)] = torch.from_numpy(found.picture_id[mine])
    size_B2[: len(mine), 0] = torch.from_numpy(found.picture_height[mine])
    size_B2[: len(mine), 1] = torch.from_numpy(found.picture_width[mine])
    return {"picture": picture_B, "size": size_B2}


class _Batches:
    """Begins batches of pictures."""

    def __init__(self, settings: DataSettings, pin_memory: bool) -> None:
        self._settings, self._pin_memory = settings, pin_memory
        self._normalizer = Normalizer(settings.facts.mean, settings.facts.std, settings.dtype)
        Image.preinit()  # registers the decoders; not in several threads at once
        self.threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On the host, pinned where a GPU takes them."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._pin_memory)

    def begin(
        self, size: int, pictures: int, pixels: Callable[[int], NDArray[np.uint8]], tensors: dict[str, Tensor]
    ) -> PendingBatch:
        """Begin a batch of ``size``, whose first ``pictures`` slots ``pixels`` makes, beside ``tensors``."""
        side = self._settings.facts.image_size
        image_BHWC = self.zeros((size, side, side, self._settings.channels), self._settings.dtype)

        def fill(slot: int) -> None:
            self._normalizer.write(pixels(slot), image_BHWC[slot])

        return self.threads.begin({"image": image_BHWC.permute(0, 3, 1, 2), **tensors}, pictures, fill)
