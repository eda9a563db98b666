"""The reader of pictures. A workload describes its data by a subclass of :class:`PictureData`.

With ``reader.reader=dali``, DALI decodes and transforms (:mod:`common.vision.dali_reader`). Otherwise, threads of this
process do, with Pillow's decoder and the arithmetic of torchvision's transforms; decoding and resizing release the
GIL. In both, the random numbers of a training picture depend only on (seed, epoch, sample). The stream of batches is
therefore the same for any number of threads and continues bit for bit from any position.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch
from PIL import Image

from common.data.batches import DataSource, EvalSource, HostBatch
from common.data.order import EpochStream, EvalShard
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.vision import dali_reader
from common.vision.dali import choose_reader
from common.vision.pictures import EvaluationSplit, ReaderConfig, Sample, TrainingSplit, Transform

Facts = TypeVar("Facts")
Reader = TypeVar("Reader", bound=ReaderConfig)


class PictureData(ABC, Generic[Facts, Reader]):
    """Describes a workload's data to the reader, and opens them.

    Args:
        facts: the workload's dataset constants.
    """

    def __init__(self, facts: Facts, reader: Reader, dtype: torch.dtype) -> None:
        self.facts, self.reader, self.dtype = facts, reader, dtype
        self.transform = self.build_transform()

    @abstractmethod
    def build_transform(self) -> Transform:
        """Return the transform of the pixels."""

    @abstractmethod
    def training(self, root: Path, layout: Layout, micro_batch: int, accumulation: int) -> TrainingSplit:
        """Open the files of training under ``root``; see :meth:`open_train`."""

    @abstractmethod
    def validation(self, root: Path, layout: Layout, batch: int) -> EvaluationSplit:
        """Open the files of evaluation under ``root``; see :meth:`open_eval`."""

    def open_train(self, root: Path, layout: Layout, micro_batch: int, accumulation: int = 1) -> DataSource:
        """Open the training data under ``root`` for this rank. Call it after ``run_start``.

        Args:
            layout: gives the replica (axis dp), the device and the seed.
            micro_batch: pictures per micro-batch of a replica.
            accumulation: micro-batches per step of a replica.

        Raises:
            DataError: files are missing, damaged, or do not fit the settings. While reading: a picture is unreadable
                or undecodable.
            ConfigError: DALI is requested and cannot be imported.
        """
        dali = choose_reader(self.reader.reader) == "dali"
        split = self.training(root, layout, micro_batch, accumulation)
        if dali:
            return dali_reader.train_source(split, self.transform, self.reader, layout.device)
        batches = _ThreadedBatches(split, self.transform, self.reader, layout.device)

        def begin(number: int) -> PendingBatch:
            samples = split.columns.samples(split.stream, number)
            return batches.begin(samples, len(samples))

        return ThreadedTrainSource(
            split.stream, split.eval_samples, split.synthetic, batches.threads, begin, split.pictures.close
        )

    def open_eval(self, root: Path, layout: Layout, batch: int) -> EvalSource:
        """Open the evaluation data under ``root`` for this rank, after ``run_start``. Raises like :meth:`open_train`.

        Args:
            batch: samples of an evaluation batch on this rank.
        """
        dali = choose_reader(self.reader.reader) == "dali"
        split = self.validation(root, layout, batch)
        if dali:
            return dali_reader.eval_source(split, self.transform, self.reader, layout.device)
        batches = _ThreadedBatches(split, self.transform, self.reader, layout.device)

        def begin(indices: Sequence[int]) -> PendingBatch:
            return batches.begin([(0, index) for index in indices], batch)

        return ThreadedEvalSource(split.shard, batches.threads, begin, split.pictures.close)

    def warm_up(self, layout: Layout, micro_batch: int) -> None:
        """Load and warm up the reader's libraries before ``run_start``, without reading data."""
        if choose_reader(self.reader.reader) == "dali":
            batch = micro_batch * self.reader.input_batch_multiplier
            dali_reader.warm_up(self.transform, self.reader, layout.device, batch)


def epoch_stream(samples: int, layout: Layout, micro_batch: int, accumulation: int) -> EpochStream:
    """Return this replica's part of the training on ``samples`` pictures, all in one random order per epoch."""
    return EpochStream(samples, micro_batch, accumulation, layout.size("dp"), layout.index("dp"), layout.seed)


def eval_shard(samples: int, layout: Layout, batch: int) -> EvalShard:
    """Return this replica's part of an evaluation of ``samples`` pictures."""
    return EvalShard(samples, batch, layout.size("dp"), layout.index("dp"))


class _ThreadedBatches:
    """Makes batches in threads of this process."""

    def __init__(
        self, split: TrainingSplit | EvaluationSplit, transform: Transform, reader: ReaderConfig, device: torch.device
    ) -> None:
        self._pictures, self._columns, self._transform = split.pictures, split.columns, transform
        self._pin_memory = device.type == "cuda"
        Image.preinit()  # registers the decoders, which must not happen in several threads at once
        self.threads = SampleThreads(reader.threads, reader.prefetch)

    def begin(self, samples: Sequence[Sample], slots: int) -> PendingBatch:
        """Start a batch. Slots after the last sample are padding."""
        transform, columns = self._transform, self._columns
        image_BHWC = torch.zeros((slots, *transform.shape), dtype=transform.dtype, pin_memory=self._pin_memory)
        tensors = columns.empty(samples, slots, self._pin_memory)

        def fill(slot: int) -> None:
            index = samples[slot][1]
            record = self._pictures.record(index)
            augmentation = columns.put(tensors, slot, samples[slot], record)
            transform.write(self._pictures.picture(index, record), augmentation, image_BHWC[slot])

        return self.threads.begin(transform.finish({**tensors, "image": image_BHWC}), len(samples), fill)


class CachedSource:
    """A :class:`common.data.batches.EvalSource` that caches the batches of the first complete evaluation.

    Args:
        source: source of the batches, which is closed after this evaluation.
    """

    def __init__(self, source: EvalSource, device: torch.device) -> None:
        self.eval_samples = source.eval_samples
        self._source: EvalSource | None = source
        self._length, self._device = len(source), device
        self._cached: list[HostBatch] = []

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[HostBatch]:
        """Yield the batches of one evaluation, on the device. Raises the errors of the source."""
        if self._source is None:
            yield from self._cached
            return
        cached = []
        for batch in self._source:
            tensors = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.tensors.items()}
            cached.append(dataclasses.replace(batch, tensors=tensors))
            yield cached[-1]
        self._cached = cached
        self._close_source()

    def close(self) -> None:
        """Close the source and free the batches."""
        self._close_source()
        self._cached = []

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
