"""Orders of samples whose costs differ: micro-batches of equal cost, and evaluation batches that fit a capacity."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.data.batches import Block
from common.data.order import EpochStream, MicroBatches
from common.errors import DataError


def balanced(weights: Sequence[int], bins: int) -> list[list[int]]:
    """Return the items of each bin, in ascending order: the heaviest item goes first, into the lightest bin.

    With at least as many items as bins, no bin is empty.
    """
    heap = [(0, number) for number in range(bins)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        weight, lightest = heap[0]
        filled[lightest].append(item)
        heapq.heapreplace(heap, (weight + weights[item] + 1, lightest))  # 1 spreads weights of 0, too
    return [sorted(items) for items in filled]


class BalancedStream:
    """One replica's part of the training; a :class:`common.data.order.SampleStream`.

    The global batches are those of an :class:`EpochStream`. Each is divided into micro-batches of about the same
    weight, so their numbers of samples differ. N replicas have the micro-batches of one replica that accumulates N.

    Args:
        weight_P: (P,) weight of each sample, not negative.
        key_of: returns the batch key of all micro-batches of a global batch from the samples of each, so that all
            micro-batches of an iteration have one key, on all replicas.
    """

    def __init__(
        self,
        weight_P: NDArray[np.int32],
        mine: MicroBatches,
        seed: int,
        key_of: Callable[[Sequence[Sequence[int]]], Hashable],
    ) -> None:
        self._weight_P, self._mine = weight_P, mine
        self._global = EpochStream(len(weight_P), mine.micro_batch * mine.streams, seed=seed)
        self.train_samples, self.micro_batch, self.replicas = len(weight_P), mine.micro_batch, mine.replicas
        self._divided = functools.lru_cache(maxsize=2)(self._divide)  # the key follows the samples
        self._key = functools.lru_cache(maxsize=2)(lambda step: key_of(self.global_batch(step)))

    def first_micro_batch(self, block: Block) -> int:
        """Return the number of micro-batches of this replica before ``block``."""
        return self._mine.first(block)

    def micro_batches(self, block: Block) -> int:
        """Return the number of micro-batches of this replica in ``block``: equal on all replicas."""
        return self._mine.count(block)

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """Return the (epoch, sample) pairs of micro-batch ``number``: ``micro_batch`` on average, and at least 1."""
        step, accumulation_step = self._mine.step_of(number)
        return self._divided(step)[self._mine.stream(accumulation_step)]

    def step_of(self, number: int) -> int:
        """Return the global batch that micro-batch ``number`` belongs to."""
        return self._mine.step_of(number)[0]

    def global_batch(self, step: int) -> list[list[int]]:
        """Return the samples of each micro-batch of a global batch, over all replicas."""
        return [[sample for _, sample in pairs] for pairs in self._divided(step)]

    def key(self, number: int) -> Hashable:
        """Return the batch key of micro-batch ``number``."""
        return self._key(self.step_of(number))

    def _divide(self, step: int) -> list[list[tuple[int, int]]]:
        pairs = self._global.samples_of(step)
        weights = self._weight_P[[sample for _, sample in pairs]].tolist()
        return [[pairs[item] for item in items] for items in balanced(weights, self._mine.streams)]


class PackedShard:
    """One replica's part of an evaluation set, in batches that fit; a :class:`common.data.order.SampleShard`.

    Consecutive samples form a batch, as many as fit, and the batches are distributed to the replicas in turn. Replicas
    with one batch less end with an empty one.

    Args:
        sizes_PC: (P, C) sizes of each sample, such as its numbers of nodes and edges.
        most_C: largest sums of the sizes in a batch.
        batch: most samples of a batch.
        key: batch key of all batches.
        setting: name of the setting that ``most_C`` follows from, for messages.

    Raises:
        DataError: a sample alone does not fit.
    """

    def __init__(
        self, sizes_PC: NDArray[np.int32], most_C: Sequence[int], batch: int, key: Hashable, setting: str,
        replicas: int = 1, replica: int = 0,
    ) -> None:  # fmt: skip
        self.eval_samples, self.batch, self.replicas, self._key = len(sizes_PC), batch, replicas, key
        sums_PC = np.concatenate([np.zeros((1, len(most_C)), np.int64), np.cumsum(sizes_PC, 0, dtype=np.int64)])
        cut: list[range] = []
        while (first := cut[-1].stop if cut else 0) < self.eval_samples:
            limits = enumerate(sums_PC[first] + most_C)
            ends = [int(np.searchsorted(sums_PC[:, column], limit, side="right")) - 1 for column, limit in limits]
            if (end := min(first + batch, *ends)) == first:
                sizes = ", ".join(map(str, sizes_PC[first].tolist()))
                raise DataError(f"sample {first} of the evaluation is too large ({sizes}) for {setting}")
            cut.append(range(first, end))
        self.batches = -(-len(cut) // replicas)
        mine = cut[replica::replicas]
        self._mine = mine + [range(0)] * (self.batches - len(mine))

    def samples(self, batch: int) -> Sequence[int]:
        """Return the real samples in ``batch`` (from 0)."""
        return self._mine[batch]

    def valid(self, batch: int) -> int:
        """Return the number of real samples in ``batch`` (from 0)."""
        return len(self._mine[batch])

    def key(self, batch: int) -> Hashable:
        """Return the key of all batches."""
        return self._key
