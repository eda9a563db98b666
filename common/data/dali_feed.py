"""DALI pipelines whose input files this process reads, so that the suite decides the order of samples.

Threads of this process read the encoded files, and DALI decodes them. A pipeline can start at any position of the
order of :mod:`common.data.order`, so resuming needs no skipped batches. This process also decides the augmentation of
each sample, such as mirroring. Tensors that DALI does not process, such as boxes, bypass the pipeline.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.ahead import ahead
from common.data.batches import Block, HostBatch
from common.data.dali import PipelineRunner, SlicedBatches
from common.data.order import SampleStream
from common.data.threads import PendingBatch, SampleThreads
from common.errors import DataError
from common.formats.jpeg import REMEDY, decode

Inputs = tuple[list[NDArray[np.uint8]], NDArray[Any]]
"""Input of one run of a pipeline: encoded files, and a number for each file, such as whether to mirror the picture."""


@dataclass(frozen=True)
class Feed:
    """The inputs of one run of a pipeline with N samples.

    Attributes:
        paths: sources of the samples, for messages.
        encoded: encoded files, (bytes,) each; complete when ``pending`` has finished.
        flags: (N,), one number per sample, or (N, F), several.
        pending: reads the files, and fills the tensors (N, ...) that bypass the pipeline.
    """

    paths: Sequence[Path | str]
    encoded: list[NDArray[np.uint8]]
    flags: NDArray[Any]
    pending: PendingBatch


def begin_feed(
    threads: SampleThreads,
    paths: Sequence[Path | str],
    read: Callable[[int], bytes],
    flags: NDArray[Any],
    tensors: dict[str, Tensor],
    put: Callable[[int], None] = lambda slot: None,
) -> Feed:
    """Start to read the files of a feed and return the feed.

    Args:
        threads: threads that read the files.
        paths, flags: see :class:`Feed`.
        read: returns the file of sample 0, 1, ...; its errors are raised when the feed is used.
        tensors: tensors that bypass the pipeline.
        put: writes the values of sample 0, 1, ... into ``tensors`` and ``flags``.
    """
    encoded = [np.empty(0, np.uint8)] * len(paths)

    def fill(slot: int) -> None:
        encoded[slot] = np.frombuffer(read(slot), np.uint8)
        put(slot)

    return Feed(paths, encoded, flags, threads.begin(tensors, len(paths), fill))


class FedRunner:
    """Runs a pipeline on feeds, in order; a :class:`common.data.dali.Runner`.

    Args:
        build: returns the pipeline; its argument is the function that returns the inputs of the next run.
        begin: starts the feed of the run with this number, on ``threads``.
        step: difference between the numbers of two consecutive runs.
        threads: threads that read the files.
        prefetch: number of feeds that are started in advance.
        names, dtypes: outputs of the pipeline, see :class:`common.data.dali.PipelineRunner`.
        folder: folder of the files, for messages.
        close_data: closes the data that ``begin`` reads.
    """

    def __init__(
        self,
        build: Callable[[Callable[[], Inputs]], Any],
        begin: Callable[[int], Feed],
        step: int,
        threads: SampleThreads,
        prefetch: int,
        names: tuple[str, ...],
        dtypes: tuple[torch.dtype, ...],
        folder: Path,
        close_data: Callable[[], None] = lambda: None,
    ) -> None:
        self._close_data = close_data
        self._build, self._begin, self._step = build, begin, step
        self._threads, self._prefetch = threads, prefetch
        self._outputs = (names, dtypes, folder)
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
        self._close_data()

    def _built(self) -> PipelineRunner:
        names, dtypes, folder = self._outputs
        return PipelineRunner(self._build(self._inputs), names, dtypes, folder)

    def _inputs(self) -> Inputs:
        feed = next(self._feeds)
        feed.pending.finish()
        self._fed.append(feed)
        return feed.encoded, feed.flags

    def _release(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._fed.clear()
        self._feeds = iter(())  # frees the old iterator, which cancels the feeds that it has started

    def _name_culprit(self, error: DataError) -> None:
        """Raise DataError for the first picture of the feeds that Pillow cannot decode either, if there is one."""
        for feed in self._fed:
            for path, data in zip(feed.paths, feed.encoded, strict=True):
                try:
                    decode(data.tobytes())
                except ValueError as fault:
                    raise DataError(f"{path}: the picture cannot be decoded: {fault}; {REMEDY}") from error


class FedTrainSource:
    """Training batches of one replica from any position; a :class:`common.data.batches.DataSource`.

    Args:
        runner: its run ``number`` starts with micro-batch ``number``, counted over the whole training.
        stream: the order of samples.
        multiplier: micro-batches per run.
        eval_samples: size of the evaluation set.
        stand_in: whether the data are synthetic.
        finish: converts outputs of the runner to the tensors of a batch.
    """

    def __init__(
        self,
        runner: FedRunner,
        stream: SampleStream,
        multiplier: int,
        eval_samples: int,
        stand_in: bool,
        finish: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    ) -> None:
        self.train_samples, self.eval_samples, self.stand_in = stream.train_samples, eval_samples, stand_in
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
