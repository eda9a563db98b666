"""The DALI form of the reader: threads read encoded pictures in the suite's order; DALI decodes and transforms them.

A pipeline can start at any position of the order of :mod:`common.data.order`, so resuming needs no skipped batches.
This process also draws the augmentation of each picture, because it changes the columns, such as boxes, too. The
columns bypass the pipeline.
"""

from __future__ import annotations

import importlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.batches import Block, HostBatch
from common.data.order import SampleStream
from common.data.threads import PendingBatch, SampleThreads, ahead
from common.errors import DataError
from common.formats.jpeg import REMEDY, decode
from common.vision.dali import (
    PipelineEvalSource,
    PipelineRunner,
    SlicedBatches,
    decoder_arguments,
    new_pipeline,
    synthetic_jpegs,
)
from common.vision.pictures import EvaluationSplit, Pictures, ReaderConfig, Sample, TrainingSplit, Transform

WARM_UP_SIZE = (640, 480)
"""Width and height of the picture of a warm-up, px."""

Inputs = tuple[list[NDArray[np.uint8]], NDArray[np.float32]]
"""Input of one run of a pipeline: encoded pictures, and the numbers (B, F) of their augmentations."""


@dataclass(frozen=True)
class Feed:
    """The inputs of one run of a pipeline with B pictures.

    Attributes:
        names: descriptions of the pictures, for messages.
        encoded: encoded pictures, (bytes,) each; complete when ``pending`` has finished.
        numbers: (B, F), complete when ``pending`` has finished.
        pending: reads the pictures, and fills the columns that bypass the pipeline.
    """

    names: Sequence[str]
    encoded: list[NDArray[np.uint8]]
    numbers: NDArray[np.float32]
    pending: PendingBatch


class FedRunner:
    """Runs a pipeline on feeds, in order; a :class:`common.vision.dali.Runner`.

    Args:
        build: returns the pipeline; its argument is the function that returns the inputs of the next run.
        begin: starts the feed of the run with this number, on ``threads``.
        step: difference between the numbers of two consecutive runs.
        threads: threads that read the files.
        prefetch: number of feeds that are started in advance. DALI asks for all its prefetched runs at once.
        pictures: pictures that ``begin`` reads; :meth:`close` closes them.
    """

    def __init__(
        self,
        build: Callable[[Callable[[], Inputs]], Any],
        begin: Callable[[int], Feed],
        step: int,
        threads: SampleThreads,
        prefetch: int,
        dtype: torch.dtype,
        pictures: Pictures,
    ) -> None:
        self._build, self._begin, self._step = build, begin, step
        self._threads, self._prefetch = threads, prefetch
        self._dtype, self._pictures = dtype, pictures
        self._feeds: Iterator[Feed] = iter(())
        self._fed: deque[Feed] = deque()
        self._pipeline: PipelineRunner | None = self._built()
        self._has_run = False
        self.start(0)

    def start(self, number: int) -> None:
        """Make ``number`` the next run. A pipeline that has run is replaced, which drops its prefetched runs."""
        if self._has_run:
            self._release()
            self._pipeline, self._has_run = self._built(), False
        self._feeds = ahead(
            map(self._begin, itertools.count(number, self._step)), self._prefetch, lambda feed: feed.pending.abandon()
        )

    def next(self) -> dict[str, Tensor]:
        """Return the outputs of the next run, and the tensors that bypassed the pipeline.

        Raises:
            DataError: a file could not be read or decoded; the message names it.
        """
        assert self._pipeline is not None, "closed"
        self._has_run = True
        try:
            outputs = self._pipeline.next()
        except DataError as error:
            if isinstance(error.__cause__, RuntimeError):  # from DALI, not from reading a file
                self._name_culprit(error)
            raise
        return outputs | self._fed.popleft().pending.tensors

    def skip(self, runs: int) -> None:
        """Run ``runs`` times and drop the outputs."""
        for _ in range(runs):
            self.next()

    def close(self) -> None:
        """Release the pipeline, stop the threads and close the data."""
        self._release()
        self._threads.close()
        self._pictures.close()

    def _built(self) -> PipelineRunner:
        return PipelineRunner(self._build(self._inputs), ("image",), (self._dtype,), self._pictures.path)

    def _inputs(self) -> Inputs:
        feed = next(self._feeds)
        feed.pending.finish()
        self._fed.append(feed)
        return feed.encoded, feed.numbers

    def _release(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._fed.clear()
        self._feeds = iter(())  # frees the old iterator, which cancels the feeds that it has started

    def _name_culprit(self, error: DataError) -> None:
        """Raise DataError for the first picture of the feeds that Pillow cannot decode either, if there is one."""
        for feed in self._fed:
            for name, data in zip(feed.names, feed.encoded, strict=True):
                try:
                    decode(data.tobytes())
                except ValueError as fault:
                    raise DataError(f"{name}: the picture cannot be decoded: {fault}; {REMEDY}") from error


class FedTrainSource:
    """Training batches of one replica from any position; a :class:`common.data.batches.DataSource`.

    Args:
        runner: its run ``number`` starts with micro-batch ``number``, counted over the whole training.
        stream: the order of samples.
        multiplier: micro-batches per run.
        synthetic: whether the data are synthetic.
        finish: converts outputs of the runner to the tensors of a batch.
    """

    def __init__(
        self,
        runner: FedRunner,
        stream: SampleStream,
        multiplier: int,
        eval_samples: int,
        synthetic: bool,
        finish: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    ) -> None:
        self.train_samples, self.eval_samples, self.synthetic = stream.train_samples, eval_samples, synthetic
        self.stream = stream
        self._runner, self._multiplier, self._finish = runner, multiplier, finish
        self._begun = 0
        self._sliced = SlicedBatches(runner, stream.micro_batch, multiplier)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``. A jump builds a new pipeline.

        Raises:
            DataError: a file could not be read or decoded.
        """
        before, nominal = self.stream.first_micro_batch(block), self.stream.micro_batch * self.stream.replicas
        first = before + start
        if first != self._begun + self._sliced.delivered:
            self._runner.start(first)
            self._begun, self._sliced = first, SlicedBatches(self._runner, self.stream.micro_batch, self._multiplier)
        for position in range(start, self.stream.micro_batches(block)):
            made = self._finish(self._sliced.next())
            yield HostBatch(made, nominal, position, self.stream.key(before + position))

    def close(self) -> None:
        """Release the pipeline and stop the threads."""
        self._runner.close()


class _Feeds:
    """Starts the feeds of a split's pictures."""

    def __init__(
        self, split: TrainingSplit | EvaluationSplit, transform: Transform, reader: ReaderConfig, device: torch.device
    ) -> None:
        self._pictures, self._columns, self._transform = split.pictures, split.columns, transform
        self._reader, self._device = reader, device
        self._threads = SampleThreads(reader.threads, reader.prefetch)

    def runner(self, begin: Callable[[int], Feed], batch: int, step: int, training: bool) -> FedRunner:
        """Return the runner of a pipeline for batches of ``batch`` pictures; see :class:`FedRunner`."""

        def build(source: Callable[[], Inputs]) -> Any:
            return picture_pipeline(source, batch, self._transform, self._reader, self._device, training)

        dtype = self._transform.dtype
        return FedRunner(build, begin, step, self._threads, self._reader.prefetch, dtype, self._pictures)

    def begin(self, samples: Sequence[Sample], slots: int) -> Feed:
        """Start a feed. Slots after the last sample are padding with its picture."""
        pictures, columns, transform = self._pictures, self._columns, self._transform
        indices = [sample[1] for sample in samples]
        indices += [indices[-1] if indices else 0] * (slots - len(indices))
        tensors = columns.empty(samples, slots, self._device.type == "cuda")
        encoded = [np.empty(0, np.uint8)] * slots
        numbers_BF = np.tile(np.array(transform.neutral, np.float32), (slots, 1))

        def fill(slot: int) -> None:
            record = pictures.record(indices[slot])
            size = pictures.picture_size(indices[slot], record)
            encoded[slot] = np.frombuffer(record.data, np.uint8)
            if slot < len(samples):
                augmentation = columns.put(tensors, slot, samples[slot], record)
                if augmentation is not None:
                    numbers_BF[slot] = transform.numbers(augmentation, *size)

        names = [pictures.describe(index) for index in indices]
        return Feed(names, encoded, numbers_BF, self._threads.begin(tensors, slots, fill))


def train_source(
    split: TrainingSplit, transform: Transform, reader: ReaderConfig, device: torch.device
) -> FedTrainSource:
    """Return the training batches of one replica, decoded on ``device``.

    Raises:
        DataError: while reading: a picture is unreadable or undecodable.
    """
    feeds, multiplier = _Feeds(split, transform, reader, device), reader.input_batch_multiplier

    def begin(number: int) -> Feed:
        parts = (split.columns.samples(split.stream, number + part) for part in range(multiplier))
        samples = list(itertools.chain.from_iterable(parts))
        return feeds.begin(samples, len(samples))

    runner = feeds.runner(begin, split.stream.micro_batch * multiplier, multiplier, training=True)
    return FedTrainSource(runner, split.stream, multiplier, split.eval_samples, split.synthetic, transform.finish)


def eval_source(
    split: EvaluationSplit, transform: Transform, reader: ReaderConfig, device: torch.device
) -> PipelineEvalSource:
    """Return the evaluation batches of one replica. Raises like :func:`train_source`."""
    feeds, shard = _Feeds(split, transform, reader, device), split.shard

    def begin(number: int) -> Feed:
        return feeds.begin([(0, index) for index in shard.samples(number % shard.batches)], shard.batch)

    runner = feeds.runner(begin, shard.batch, 1, training=False)
    return PipelineEvalSource(runner, shard, lambda tensors, valid: transform.finish(tensors))


def picture_pipeline(
    source: Callable[[], Inputs],
    batch: int,
    transform: Transform,
    reader: ReaderConfig,
    device: torch.device,
    training: bool,
) -> Any:
    """Return a built DALI pipeline that decodes and transforms; it outputs pictures (B, H, W, C).

    Args:
        source: function that returns the encoded pictures and the augmentation numbers of the next batch.
        training: whether the transform uses the augmentation numbers.
    """
    dali = importlib.import_module("nvidia.dali")
    fn, types = dali.fn, dali.types
    pipeline = new_pipeline(batch, device, reader)
    with pipeline:
        if training and transform.neutral:
            kinds = {"dtype": [types.UINT8, types.FLOAT], "ndim": [1, 1]}
            jpeg, numbers = fn.external_source(source=source, num_outputs=2, **kinds)
        else:
            jpeg, numbers = fn.external_source(source=lambda: source()[0], dtype=types.UINT8, ndim=1), None
        decoder = decoder_arguments(device, reader.hw_decoder_load, *transform.largest, transform.padding_bytes)
        pipeline.set_outputs(transform.graph(dali, fn.decoders.image(jpeg, **decoder), numbers))
    pipeline.build()
    return pipeline


def warm_up(transform: Transform, reader: ReaderConfig, device: torch.device, batch: int) -> None:
    """Run every operator of training once on a synthetic picture to load libraries, memory pools and kernels.

    Reads no file, so that it may run before ``run_start``.
    """
    width, height = transform.largest
    jpegs = synthetic_jpegs(batch, min(width, WARM_UP_SIZE[0]), min(height, WARM_UP_SIZE[1]))
    numbers_BF = np.tile(np.array(transform.neutral, np.float32), (batch, 1))
    picture_pipeline(lambda: (jpegs, numbers_BF), batch, transform, reader, device, training=True).run()
