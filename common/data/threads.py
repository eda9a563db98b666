"""Readers that run anywhere: threads of this process make the samples of a batch, a few batches ahead.

For libraries that let go of the interpreter while they decode. The order of samples is that of an
:class:`common.data.order.SampleStream`, whatever the number of threads, and continues from any position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from common.data.ahead import ahead
from common.data.batches import Block, HostBatch
from common.data.order import SampleShard, SampleStream


@dataclass(frozen=True)
class PendingBatch:
    """A batch that ``tasks`` are filling."""

    tensors: dict[str, Tensor]
    tasks: list[Future[None]]

    def finish(self) -> dict[str, Tensor]:
        """The batch once it is whole; raises what a task raised."""
        for task in self.tasks:
            task.result()
        return self.tensors

    def abandon(self) -> None:
        """Begin no more of its tasks."""
        for task in self.tasks:
            task.cancel()


class SampleThreads:
    """Fills batches in threads; errors surface where a batch is collected.

    Args:
        threads: how many.
        prefetch: batches that are begun beside the one that is wanted.
    """

    def __init__(self, threads: int, prefetch: int) -> None:
        self._threads, self._prefetch = threads, prefetch
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="samples")

    def begin(self, tensors: dict[str, Tensor], samples: int, fill: Callable[[int], None]) -> PendingBatch:
        """Let ``fill`` write sample 0, 1, ... ``samples - 1`` into ``tensors``."""

        def fill_all(slots: range) -> None:
            for slot in slots:
                fill(slot)

        step = max(1, samples // (2 * self._threads))
        slots = range(samples)
        return PendingBatch(
            tensors, [self._pool.submit(fill_all, slots[first : first + step]) for first in range(0, samples, step)]
        )

    def collect(self, begun: Iterator[PendingBatch]) -> Iterator[dict[str, Tensor]]:
        """The finished batches in their order."""
        for batch in ahead(begun, self._prefetch, PendingBatch.abandon):
            yield batch.finish()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class ThreadedTrainSource:
    """Training batches of one replica; a :class:`common.data.batches.DataSource`.

    Args:
        stream: the order of samples.
        eval_samples, stand_in: of the data set.
        threads: make the samples.
        begin: begins this replica's micro-batch of a number, counted over the whole training, on ``threads``.
        close_data: closes what ``begin`` reads.
    """

    def __init__(
        self,
        stream: SampleStream,
        eval_samples: int,
        stand_in: bool,
        threads: SampleThreads,
        begin: Callable[[int], PendingBatch],
        close_data: Callable[[], None],
    ) -> None:
        self.train_samples, self.eval_samples, self.stand_in = stream.train_samples, eval_samples, stand_in
        self.stream = stream
        self._threads, self._begin, self._close_data = threads, begin, close_data

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``; raises what making a sample raises."""
        first, positions = self.stream.first_micro_batch(block), range(start, self.stream.micro_batches(block))
        begun = (self._begin(first + position) for position in positions)
        nominal = self.stream.micro_batch * self.stream.replicas
        for position, tensors in zip(positions, self._threads.collect(begun), strict=True):
            yield HostBatch(tensors, nominal, position, self.stream.key(first + position))

    def close(self) -> None:
        """Stop the threads and close the data."""
        self._threads.close()
        self._close_data()


class ThreadedEvalSource:
    """Evaluation batches of one replica; a :class:`common.data.batches.EvalSource`.

    Args:
        shard: this replica's samples.
        threads: make the samples.
        begin: begins the batch of some samples, fewer than a batch has at the end of the shard.
        close_data: closes what ``begin`` reads.
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
        """Yield the batches of one evaluation; raises what making a sample raises."""
        batches = range(self.shard.batches)
        begun = (self._begin(self.shard.samples(batch)) for batch in batches)
        for position, tensors in zip(batches, self._threads.collect(begun), strict=True):
            yield HostBatch(tensors, self.shard.batch * self.shard.replicas, position, self.shard.key(position))

    def close(self) -> None:
        """Stop the threads and close the data."""
        self._threads.close()
        self._close_data()
