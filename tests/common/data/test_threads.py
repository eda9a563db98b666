"""Batches that threads fill: order, the end of a shard, errors where a batch is collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from common.data.balanced_order import BalancedStream
from common.data.batches import Block
from common.data.order import EpochStream, EvalShard, MicroBatches
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource, ahead, read_groups
from common.errors import DataError


def closed() -> None:
    """What reads nothing has nothing to close."""


def numbers(threads: SampleThreads, samples: Sequence[int], size: int) -> PendingBatch:
    """A batch of the samples' own numbers, -1 behind them; sample 7 is damaged."""
    batch = torch.full((size,), -1)

    def fill(slot: int) -> None:
        if samples[slot] == 7:
            raise DataError("sample 7 is damaged")
        batch[slot] = samples[slot]

    return threads.begin({"number": batch}, len(samples), fill)


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_batches_are_those_of_the_stream_from_any_position(count, prefetch):
    stream, threads = EpochStream(6, 2, seed=1), SampleThreads(count, prefetch)

    def begin(number: int) -> PendingBatch:
        return numbers(threads, [sample for _, sample in stream.samples_of(number)], 2)

    source = ThreadedTrainSource(stream, 3, True, threads, begin, closed)
    block = Block(0, 1, 2, 0, 12)
    for start in (0, 4):
        found = [(batch.position, batch.tensors["number"].tolist()) for batch in source.batches(block, start)]
        assert found == [
            (position, [sample for _, sample in stream.samples(block, position)]) for position in range(start, 6)
        ]
    source.close()


def test_a_global_batch_has_its_key_computed_once_in_spite_of_prefetching():
    steps: list[Sequence[Sequence[int]]] = []

    def key_of(micro_batches: Sequence[Sequence[int]]) -> str:
        steps.append(micro_batches)
        return str(micro_batches)

    stream, threads = BalancedStream(np.ones(12, np.int32), MicroBatches(2, 2), 1, key_of), SampleThreads(1, 5)
    source = ThreadedTrainSource(stream, 3, True, threads, lambda number: numbers(threads, [-number], 1), closed)
    found = [(batch.tensors["number"].tolist(), batch.key) for batch in source.batches(Block(0, 1, 2, 0, 24))]
    source.close()
    assert len(steps) == 6
    assert found == [([-number], str(stream.global_batch(number // 2))) for number in range(12)]


def test_a_shard_ends_with_padding():
    threads = SampleThreads(2, 1)
    source = ThreadedEvalSource(EvalShard(5, 2, 1, 0), threads, lambda samples: numbers(threads, samples, 2), closed)
    for _ in range(2):
        assert [batch.tensors["number"].tolist() for batch in source] == [[0, 1], [2, 3], [4, -1]]
    source.close()


def test_an_error_surfaces_where_its_batch_is_collected():
    threads = SampleThreads(2, 2)
    source = ThreadedEvalSource(EvalShard(9, 3, 1, 0), threads, lambda samples: numbers(threads, samples, 3), closed)
    batches = iter(source)
    assert [next(batches).tensors["number"].tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(DataError, match="sample 7 is damaged"):
        next(batches)
    source.close()


@pytest.mark.parametrize("window", [0, 1, 3, 9])
def test_everything_comes_in_order_with_a_window_begun(window):
    begun = []

    def begin() -> Iterator[int]:
        for number in range(5):
            begun.append(number)
            yield number

    for expected, piece in enumerate(ahead(begin(), window, pytest.fail)):
        assert piece == expected
        assert len(begun) == min(expected + 1 + window, 5)
    assert len(begun) == 5


def test_results_that_no_caller_waits_for_are_abandoned():
    abandoned = []
    pieces = ahead(iter(range(9)), 3, abandoned.append)
    assert next(pieces) == 0
    pieces.close()
    assert abandoned == [1, 2, 3]


@pytest.mark.parametrize("threads", [1, 3])
def test_groups_have_all_samples_in_order(threads: int) -> None:
    groups = list(read_groups(range(8), lambda number: number**2, threads, 3))
    assert groups == [[(0, 0), (1, 1), (2, 4)], [(3, 9), (4, 16), (5, 25)], [(6, 36), (7, 49)]]


def test_an_error_of_a_group_is_raised() -> None:
    groups = read_groups(range(9), lambda number: 1 // (5 - number), 2, 3)
    assert len(next(groups)) == 3
    with pytest.raises(ZeroDivisionError):
        next(groups)
