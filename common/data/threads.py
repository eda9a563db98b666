"""Readers for any machine: threads of this process make the samples, a few batches ahead.

They suit libraries that release the GIL while they decode. The order of samples is that of an
:class:`common.data.order.SampleStream`, for any number of threads, and reading can start at any position.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from common.data.batches import Block, HostBatch
from common.data.order import SampleShard, SampleStream

Begun = TypeVar("Begun")
Sample = TypeVar("Sample")
Content = TypeVar("Content")


def ahead(begun: Iterator[Begun], window: int, abandon: Callable[[Begun], object]) -> Iterator[Begun]:
    """Yield the items of ``begun`` in order, while the work of the next ``window`` items is already started.

    Args:
        begun: starts one piece of work per step, such as a future.
        window: number of pieces in progress in addition to the one that is yielded.
        abandon: cancels a piece that was started but not yielded, when the iteration ends early.
    """
    pending: deque[Begun] = deque()
    try:
        for piece in begun:
            pending.append(piece)
            if len(pending) > window:
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        for piece in pending:
            abandon(piece)


def read_groups(
    samples: Iterable[Sample], read: Callable[[Sample], Content], threads: int, size: int
) -> Iterator[list[tuple[Sample, Content]]]:
    """Yield samples with the results of ``read``, in order, in lists of ``size``; the last list may be shorter.

    Threads of this process read two lists ahead. Raises the first error of ``read``.
    """
    with ThreadPoolExecutor(threads) as pool:
        begun = ((sample, pool.submit(read, sample)) for sample in samples)
        pieces = ahead(begun, 2 * size, lambda piece: piece[1].cancel())
        done = ((sample, future.result()) for sample, future in pieces)
        while group := list(itertools.islice(done, size)):
            yield group


@dataclass(frozen=True)
class PendingBatch:
    """A batch that ``tasks`` are filling."""

    tensors: dict[str, Tensor]
    tasks: list[Future[None]]

    def finish(self) -> dict[str, Tensor]:
        """Wait until the batch is complete and return it; raises the error of a task."""
        for task in self.tasks:
            task.result()
        return self.tensors

    def abandon(self) -> None:
        """Cancel the tasks that have not started."""
        for task in self.tasks:
            task.cancel()


class SampleThreads:
    """Fills batches with threads; errors are raised when a batch is collected.

    Args:
        prefetch: number of batches that are started in advance.
    """

    def __init__(self, threads: int, prefetch: int) -> None:
        self._threads, self._prefetch = threads, prefetch
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="samples")

    def begin(self, tensors: dict[str, Tensor], samples: int, fill: Callable[[int], None]) -> PendingBatch:
        """Start to make a batch on the threads, and return it as pending.

        Args:
            samples: number of samples; ``fill`` is called with 0, 1, ... ``samples - 1``.
            fill: writes the sample with this index into ``tensors``.
        """

        def fill_all(slots: range) -> None:
            for slot in slots:
                fill(slot)

        step = max(1, samples // (2 * self._threads))
        slots = range(samples)
        return PendingBatch(
            tensors, [self._pool.submit(fill_all, slots[first : first + step]) for first in range(0, samples, step)]
        )

    def collect(self, begun: Iterator[PendingBatch]) -> Iterator[dict[str, Tensor]]:
        """Yield the finished batches in order."""
        for batch in ahead(begun, self._prefetch, PendingBatch.abandon):
            yield batch.finish()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class ThreadedTrainSource:
    """Training batches of one replica; a :class:`common.data.batches.DataSource`.

    Args:
        stream: the order of samples.
        eval_samples: size of the evaluation set.
        synthetic: whether the data are synthetic.
        begin: starts this replica's micro-batch with this number, counted over the whole training, on ``threads``.
        close_data: closes the data that ``begin`` reads.
    """

    def __init__(
        self,
        stream: SampleStream,
        eval_samples: int,
        synthetic: bool,
        threads: SampleThreads,
        begin: Callable[[int], PendingBatch],
        close_data: Callable[[], None],
    ) -> None:
        self.train_samples, self.eval_samples, self.synthetic = stream.train_samples, eval_samples, synthetic
        self.stream = stream
        self._threads, self._begin, self._close_data = threads, begin, close_data

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``; raises errors of the tasks."""
        first, positions = self.stream.first_micro_batch(block), range(start, self.stream.micro_batches(block))
        keys: deque[Hashable] = deque()

        def begun() -> Iterator[PendingBatch]:
            for position in positions:
                keys.append(self.stream.key(first + position))  # the stream may keep only the latest ones
                yield self._begin(first + position)

        nominal = self.stream.micro_batch * self.stream.replicas
        for position, tensors in zip(positions, self._threads.collect(begun()), strict=True):
            yield HostBatch(tensors, nominal, position, keys.popleft())

    def close(self) -> None:
        """Stop the threads and close the data."""
        self._threads.close()
        self._close_data()


class ThreadedEvalSource:
    """Evaluation batches of one replica; a :class:`common.data.batches.EvalSource`.

    Args:
        shard: this replica's samples.
        begin: starts the batch with these samples; at the end of the shard there are fewer than in a full batch.
        close_data: closes the data that ``begin`` reads.
    """

    def __init__(
        self,
        shard: SampleShard,
        threads: SampleThreads,
        begin: Callable[[Sequence[int]], PendingBatch],
        close_data: Callable[[], None],
    ) -> None:
        self.eval_samples = shard.eval_samples
        self.shard = shard
        self._threads, self._begin, self._close_data = threads, begin, close_data

    def __len__(self) -> int:
        return self.shard.batches

    def __iter__(self) -> Iterator[HostBatch]:
        """Yield the batches of one evaluation; raises errors of the tasks."""
        batches = range(self.shard.batches)
        begun = (self._begin(self.shard.samples(batch)) for batch in batches)
        for position, tensors in zip(batches, self._threads.collect(begun), strict=True):
            yield HostBatch(tensors, self.shard.batch * self.shard.replicas, position, self.shard.key(position))

    def close(self) -> None:
        """Stop the threads and close the data."""
        self._threads.close()
        self._close_data()
