"""Reader for any machine: Pillow decodes and PyTorch resizes, in threads of this process.

As in the reference, resizing has no antialiasing and does not round pixels. The random numbers of a training picture
depend only on (seed, epoch, sample). The stream of batches is therefore the same for any number of threads and
continues bit for bit from any position. Decoding and resizing release the GIL.

Shapes: B pictures, H x W pixels, S x S after resizing, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from benchmarks.retinanet.data_settings import DataSettings
from benchmarks.retinanet.prepared import Split
from common.data.order import EpochStream, EvalShard
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.detection.picture_boxes import PictureBoxes, empty_boxes, evaluation_columns, put_boxes
from common.errors import DataError
from common.formats.jpeg import REMEDY, decode


def resized_pixels(picture: Image.Image, size: int, mirrored: bool) -> Tensor:
    """Resize an RGB picture bilinearly, mirrored if requested: (size, size, 3), fp32 levels of 0 to 255."""
    pixels_HWC = np.array(picture)
    if mirrored:
        pixels_HWC = pixels_HWC[:, ::-1].copy()
    pixels_CHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1).float()
    resized_1CSS = F.interpolate(pixels_CHW[None], (size, size), mode="bilinear", align_corners=False, antialias=False)
    return resized_1CSS[0].permute(1, 2, 0)


class _Pictures:
    """Builds batches of pictures from their files."""

    def __init__(self, settings: DataSettings, split: Split, pin_memory: bool) -> None:
        self._settings, self._split, self._pin_memory = settings, split, pin_memory
        self._mean_C, self._std_C = torch.tensor(settings.facts.mean), torch.tensor(settings.facts.std)
        Image.preinit()  # registers the decoders, which must not happen in several threads at once
        self.threads = SampleThreads(settings.reader.threads, settings.reader.prefetch)

    def empty(self, pictures: int) -> Tensor:
        """Return a batch of zeros (B, S, S, C)."""
        size = self._settings.facts.image_size
        return torch.zeros((pictures, size, size, 3), dtype=self._settings.dtype, pin_memory=self._pin_memory)

    def write(self, place: int, mirrored: bool, out_SSC: Tensor) -> None:
        """Read, resize and normalise picture ``place`` of the split into ``out_SSC``.

        Raises:
            DataError: the file is unreadable, undecodable, or has another size than its annotations say.
        """
        data = self._split.read(place)
        try:
            picture = decode(data)
        except ValueError as error:
            path = self._split.path(place)
            raise DataError(f"{path}: the picture cannot be decoded: {error}; {REMEDY}") from error
        self._split.check_size(place, *picture.size)
        pixels_SSC = resized_pixels(picture, self._settings.facts.image_size, mirrored)
        out_SSC.copy_((pixels_SSC - self._mean_C) / self._std_C)

    def close(self) -> None:
        """Do nothing, because files are closed after reading."""


def train_source(
    split: Split,
    boxes: PictureBoxes,
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
    pictures = _Pictures(settings, split, pin_memory)
    size, room = settings.facts.image_size, settings.reader.max_boxes

    def begin(number: int) -> PendingBatch:
        samples = stream.samples_of(number)
        image_BSSC = pictures.empty(len(samples))
        tensors = {"image": image_BSSC.permute(0, 3, 1, 2), **empty_boxes(len(samples), room, pin_memory)}

        def fill(slot: int) -> None:
            epoch, place = samples[slot]
            mirrored = settings.mirrors(stream.seed, epoch, place)
            pictures.write(place, mirrored, image_BSSC[slot])
            put_boxes(tensors, slot, *boxes.resized(place, size, size, mirrored))

        return pictures.threads.begin(tensors, len(samples), fill)

    return ThreadedTrainSource(stream, eval_samples, stand_in, pictures.threads, begin, pictures.close)


def eval_source(split: Split, settings: DataSettings, shard: EvalShard, pin_memory: bool = False) -> ThreadedEvalSource:
    """Return the evaluation batches of one replica; padding has id -1. Raises like :func:`train_source`.

    Args:
        shard: samples and batch size of this replica.
        pin_memory: whether batches are in page-locked memory, for asynchronous copies to a GPU.
    """
    pictures = _Pictures(settings, split, pin_memory)

    def begin(places: Sequence[int]) -> PendingBatch:
        image_BSSC = pictures.empty(shard.batch)
        tensors = evaluation_columns(split.annotations, places, shard.batch, pin_memory)
        tensors["image"] = image_BSSC.permute(0, 3, 1, 2)
        return pictures.threads.begin(
            tensors, len(places), lambda slot: pictures.write(places[slot], False, image_BSSC[slot])
        )

    return ThreadedEvalSource(shard, pictures.threads, begin, pictures.close)
