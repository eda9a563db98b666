"""The reader that runs anywhere: torchvision's transforms on Pillow's pictures, in threads of this process.

Pillow's decoder and resize are what torchvision's own transforms call; its resize takes a crop box, so that cropping
and resizing are one call on 8-bit pixels. (``torchvision.io.decode_jpeg`` is deprecated since torchvision 0.29.)

The random numbers of a training picture depend on (seed, epoch, sample) alone, so that the stream of batches is the
same whatever the number of threads, and continues bit for bit from any position. Decoding and resizing release the
interpreter's lock.

Shapes: N pictures, H x W pixels, C channels.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from benchmarks.resnet.data_settings import DataSettings
from common.data.batches import Block, HostBatch
from common.data.order import EpochStream, EvalShard, sample_generator
from common.errors import DataError
from common.formats.recordio import RecordReader

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in px, as Pillow has it."""

_ATTEMPTS = 10
_VERIFY = "check the data with 'mlperf-suite verify benchmark=resnet'"


def decode(data: bytes) -> Image.Image:
    """JPEG to an RGB picture.

    Raises:
        ValueError: ``data`` is truncated or no JPEG.
    """
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            return picture.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error


def random_crop_box(
    width: int, height: int, area: tuple[float, float], aspect: tuple[float, float], random: np.random.Generator
) -> Box:
    """A box with a random share of the area and a random aspect (log-uniform), anywhere in the picture.

    After ten boxes that do not fit: the largest centred box with the nearest aspect that is allowed.
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
    """Decode, random-resized crop, mirror: (image_size, image_size, 3)."""
    picture = decode(data)
    box = random_crop_box(*picture.size, settings.facts.crop_area, settings.facts.crop_aspect, random)
    flip = random.random() < settings.facts.mirror
    side = settings.facts.image_size
    result = np.asarray(picture.resize((side, side), Image.Resampling.BILINEAR, box=box))
    return result[:, ::-1] if flip else result


def eval_pixels(data: bytes, settings: DataSettings) -> NDArray[np.uint8]:
    """Decode, shorter side to ``eval_resize``, centre crop: (image_size, image_size, 3).

    The longer side is rounded to the nearest whole number, as DALI does it, with which NVIDIA's submissions read.
    """
    picture = decode(data)
    shorter = min(picture.size)
    width, height = ((2 * side * settings.facts.eval_resize + shorter) // (2 * shorter) for side in picture.size)
    side = settings.facts.image_size
    left, top = (width - side) // 2, (height - side) // 2
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + side, top + side)))


class Normalizer:
    """Pixels to the network's dtype through one table per channel: exact, and bfloat16 without numpy's support."""

    def __init__(self, settings: DataSettings) -> None:
        values = torch.arange(256, dtype=torch.float32)[:, None]
        table = (values - torch.tensor(settings.facts.mean)) / torch.tensor(settings.facts.std)
        self._bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[settings.dtype.itemsize]
        self._table = table.to(settings.dtype).T.contiguous().view(self._bits).numpy()  # (3, 256)

    def write(self, pixels_HWC: NDArray[np.uint8], out_HWC: Tensor) -> None:
        """Fill the first three channels of ``out_HWC``; the others stay as they are."""
        out = out_HWC.view(self._bits).numpy()
        for channel in range(3):
            out[:, :, channel] = np.take(self._table[channel], pixels_HWC[:, :, channel])


@dataclass(frozen=True)
class _Pending:
    """A batch whose pictures are being made: ``tasks`` fill ``images`` and ``labels``."""

    images: Tensor  # (N, H, W, C)
    labels: Tensor
    tasks: list[Future[None]]

    def finish(self) -> dict[str, Tensor]:
        for task in self.tasks:
            task.result()
        return {"image": self.images.permute(0, 3, 1, 2), "label": self.labels}


class _BatchMaker:
    """Fills batches in worker threads; errors surface where the batch is collected."""

    def __init__(self, settings: DataSettings, reader: RecordReader, pin_memory: bool) -> None:
        self.settings = settings
        self.reader = reader
        self._normalizer = Normalizer(settings)
        self._pin_memory = pin_memory
        Image.preinit()  # registers the decoders; not in several threads at once
        self._pool = ThreadPoolExecutor(settings.reader.threads, thread_name_prefix="pictures")

    def start(self, size: int, positions: list[int], pixels: Callable[[int, bytes], NDArray[np.uint8]]) -> _Pending:
        """Begin a batch of ``size`` from ``positions`` of the records; slots beyond them are padding, label -1.

        ``pixels`` makes the picture of slot i from its encoded bytes.
        """
        side, channels = self.settings.facts.image_size, self.settings.channels
        image_NHWC = torch.zeros((size, side, side, channels), dtype=self.settings.dtype, pin_memory=self._pin_memory)
        labels = torch.full((size,), -1, dtype=torch.int64, pin_memory=self._pin_memory)

        def fill(slots: range) -> None:
            for slot in slots:
                picture = self._picture(positions[slot], labels, slot)
                self._normalizer.write(self._make(pixels, slot, positions[slot], picture), image_NHWC[slot])

        step = max(1, len(positions) // (2 * self.settings.reader.threads))
        slots = range(len(positions))
        tasks = [self._pool.submit(fill, slots[i : i + step]) for i in range(0, len(slots), step)]
        return _Pending(image_NHWC, labels, tasks)

    def _picture(self, position: int, labels: Tensor, slot: int) -> bytes:
        record = self.reader.image(position)
        label = int(record.labels[0]) if len(record.labels) == 1 else -1
        if not 0 <= label < self.settings.facts.classes:
            raise DataError(
                f"{self.reader.describe(position)}: label {record.labels} is not one of the "
                f"{self.settings.facts.classes} classes; {_VERIFY}"
            )
        labels[slot] = label
        return record.data

    def _make(
        self, pixels: Callable[[int, bytes], NDArray[np.uint8]], slot: int, position: int, data: bytes
    ) -> NDArray[np.uint8]:
        try:
            return pixels(slot, data)
        except ValueError as error:
            place = self.reader.describe(position)
            raise DataError(f"{place}: the picture cannot be decoded: {error}; {_VERIFY}") from error

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.reader.close()


def _ahead(starts: Iterator[_Pending], prefetch: int) -> Iterator[dict[str, Tensor]]:
    """The finished batches of ``starts``, with ``prefetch`` more of them begun."""
    pending: deque[_Pending] = deque()
    try:
        for begun in starts:
            pending.append(begun)
            if len(pending) > prefetch:
                yield pending.popleft().finish()
        while pending:
            yield pending.popleft().finish()
    finally:
        for begun in pending:
            for task in begun.tasks:
                task.cancel()


class TorchvisionTrainSource:
    """Training batches of one replica; a :class:`common.data.batches.DataSource`."""

    def __init__(
        self,
        reader: RecordReader,
        settings: DataSettings,
        stream: EpochStream,
        eval_samples: int,
        stand_in: bool,
        pin_memory: bool = False,
    ) -> None:
        self.train_samples = stream.train_samples
        self.eval_samples = eval_samples
        self.stand_in = stand_in
        self.settings = settings
        self.stream = stream
        self._maker = _BatchMaker(settings, reader, pin_memory)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``.

        Raises:
            DataError: a record is damaged or its picture cannot be decoded.
        """
        positions = range(start, self.stream.micro_batches(block))
        made = _ahead((self._start(block, position) for position in positions), self.settings.reader.prefetch)
        nominal = self.stream.micro_batch * self.stream.replicas
        for position, tensors in zip(positions, made, strict=True):
            yield HostBatch(tensors, samples=nominal, position=position)

    def close(self) -> None:
        """Stop the threads and close the records."""
        self._maker.close()

    def _start(self, block: Block, position: int) -> _Pending:
        samples = self.stream.samples(block, position)

        def pixels(slot: int, data: bytes) -> NDArray[np.uint8]:
            return train_pixels(data, self.settings, sample_generator(self.stream.seed, *samples[slot]))

        return self._maker.start(self.stream.micro_batch, [sample for _, sample in samples], pixels)


class TorchvisionEvalSource:
    """Evaluation batches of one replica; iterate once per evaluation."""

    def __init__(
        self, reader: RecordReader, settings: DataSettings, shard: EvalShard, pin_memory: bool = False
    ) -> None:
        self.eval_samples = shard.eval_samples
        self.settings = settings
        self.shard = shard
        self._maker = _BatchMaker(settings, reader, pin_memory)

    def __len__(self) -> int:
        return self.shard.batches

    def __iter__(self) -> Iterator[HostBatch]:
        """Yield the batches of one evaluation; padding at their end has label -1. Raises as training does."""
        batches = range(self.shard.batches)
        made = _ahead((self._start(batch) for batch in batches), self.settings.reader.prefetch)
        for position, tensors in zip(batches, made, strict=True):
            yield HostBatch(tensors, samples=self.shard.batch * self.shard.replicas, position=position)

    def close(self) -> None:
        """Stop the threads and close the records."""
        self._maker.close()

    def _start(self, batch: int) -> _Pending:
        first = self.shard.start + batch * self.shard.batch
        positions = list(range(first, first + self.shard.valid(batch)))

        def pixels(slot: int, data: bytes) -> NDArray[np.uint8]:
            return eval_pixels(data, self.settings)

        return self._maker.start(self.shard.batch, positions, pixels)
