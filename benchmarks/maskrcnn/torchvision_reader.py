"""Reader for any machine: Pillow decodes, in threads of this process; everything else runs on the device.

Whether a training picture is mirrored depends only on (seed, epoch, sample). The stream of batches is therefore the
same for any number of threads and continues bit for bit from any position. Decoding releases the GIL.

Shapes: B pictures, in slots of S x S px.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.maskrcnn.data_settings import DataSettings
from benchmarks.maskrcnn.host_batches import TrainingColumns, evaluation_columns, slots_of
from benchmarks.maskrcnn.pictures import resized_sizes
from benchmarks.maskrcnn.prepared import TrainingPictures
from common.data.grouped_order import GroupedShard, GroupedStream
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.detection.coco_pictures import CocoPictures
from common.errors import DataError


def train_source(
    training: TrainingPictures,
    settings: DataSettings,
    stream: GroupedStream,
    eval_samples: int,
    stand_in: bool,
    pin_memory: bool,
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
    columns = TrainingColumns(training.objects, settings, stream.seed, pin_memory)
    decoder = _Decoder(training.pictures, settings, pin_memory)

    def begin(number: int) -> PendingBatch:
        slots = slots_of(stream, number)
        pixels_BSS3 = decoder.empty(len(slots))
        tensors = columns.empty(len(slots))

        def fill(slot: int) -> None:
            columns.put(tensors, slot, slots[slot])
            decoder.write(slots[slot].place, pixels_BSS3[slot])

        made = tensors | {"pixels": pixels_BSS3, "seed": tensors["seed"][:1]}
        return decoder.threads.begin(made, len(slots), fill)

    return ThreadedTrainSource(stream, eval_samples, stand_in, decoder.threads, begin, training.pictures.close)


def eval_source(
    pictures: CocoPictures, settings: DataSettings, shard: GroupedShard, pin_memory: bool
) -> ThreadedEvalSource:
    """Return the evaluation batches of one replica; padding has id -1. Raises like :func:`train_source`.

    Args:
        shard: samples and batch size of this replica.
        pin_memory: whether batches are in page-locked memory, for asynchronous copies to a GPU.
    """
    decoder = _Decoder(pictures, settings, pin_memory)
    facts, annotations = settings.facts, pictures.annotations
    size_P2 = np.stack([annotations.picture_height, annotations.picture_width], 1)
    resized_P2 = resized_sizes(size_P2, facts.min_size, facts.max_size)

    def begin(places: Sequence[int]) -> PendingBatch:
        pixels_BSS3 = decoder.empty(shard.batch)
        tensors = evaluation_columns(annotations, resized_P2, places, shard.batch, pin_memory)
        return decoder.threads.begin(
            tensors | {"pixels": pixels_BSS3},
            len(places),
            lambda slot: decoder.write(places[slot], pixels_BSS3[slot]),
        )

    return ThreadedEvalSource(shard, decoder.threads, begin, pictures.close)


class _Decoder:
    """Decodes pictures into slots."""

    def __init__(self, pictures: CocoPictures, settings: DataSettings, pin_memory: bool) -> None:
        self._pictures, self._side, self._pin_memory = pictures, settings.facts.longest_side, pin_memory
        Image.preinit()  # registers the decoders, which must not happen in several threads at once
        self.threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def empty(self, pictures: int) -> Tensor:
        """Return slots of zeros (B, S, S, 3)."""
        shape = (pictures, self._side, self._side, 3)
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=self._pin_memory)

    def write(self, place: int, slot_SS3: Tensor) -> None:
        """Decode the picture with index ``place`` to the top left of a slot.

        Raises:
            DataError: the record is unreadable, undecodable, or has another size than its annotations say.
        """
        picture, (width, height) = self._pictures.picture(place), self._pictures.size(place)
        if picture.size != (width, height):
            raise DataError(
                f"{self._pictures.describe(place)} is of {picture.size} px, its objects for {(width, height)}; check "
                "the data with 'mlperf-suite verify benchmark=maskrcnn'"
            )
        slot_SS3.numpy()[:height, :width] = np.asarray(picture)
