"""Batches that threads fill: order, the end of a shard, errors where a batch is collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from common.data.batches import Block
from common.data.order import EpochStream, EvalShard
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource, ahead
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
