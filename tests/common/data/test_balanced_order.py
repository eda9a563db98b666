"""Micro-batches of equal weight, and evaluation batches that fit a capacity."""

from __future__ import annotations

import numpy as np
import pytest

from common.data.balanced_order import BalancedStream, PackedShard, balanced
from common.data.batches import Block
from common.data.order import EpochStream, MicroBatches
from common.errors import DataError

WEIGHT = np.random.default_rng(0).integers(1, 1000, 50).astype(np.int32)
BLOCK = Block(1, 2, 1, len(WEIGHT), len(WEIGHT))


def test_heavy_items_go_first_into_the_lightest_bin() -> None:
    """By hand: 70 | 50 | 40 into three bins, then 40 beside 40, 30 beside 50, 10 beside 70."""
    assert balanced([40, 10, 70, 50, 30, 40], 3) == [[1, 2], [3, 4], [0, 5]]


@pytest.mark.parametrize("weights", [[0] * 5, [1000, 0, 0, 0, 0]], ids=["all", "all but one"])
def test_no_bin_is_empty_where_items_weigh_nothing(weights: list[int]) -> None:
    assert sorted(map(len, balanced(weights, 5))) == [1] * 5


def micro_batches(replicas: int, rank: int, accumulation: int = 1, seed: int = 3) -> list[list[tuple[int, int]]]:
    stream = BalancedStream(WEIGHT, MicroBatches(4, accumulation, replicas, rank), seed, tuple)
    first = stream.first_micro_batch(BLOCK)
    return [stream.samples_of(number) for number in range(first, first + stream.micro_batches(BLOCK))]


def test_ranks_have_the_micro_batches_of_one_rank_that_accumulates() -> None:
    ranks = [micro_batches(3, rank) for rank in range(3)]
    assert [each for step in zip(*ranks, strict=True) for each in step] == micro_batches(1, 0, accumulation=3)


def test_the_parts_of_a_global_batch_weigh_about_the_same() -> None:
    ranks, whole = [micro_batches(3, rank) for rank in range(3)], EpochStream(len(WEIGHT), 12, seed=3)
    for position, parts in enumerate(zip(*ranks, strict=True)):
        assert sorted(pair for part in parts for pair in part) == sorted(whole.samples(BLOCK, position))
        weights = [sum(int(WEIGHT[sample]) for _, sample in part) for part in parts]
        assert max(weights) - min(weights) <= max(int(WEIGHT[sample]) for part in parts for _, sample in part)


def test_a_global_batch_and_its_only_key_follow_from_the_samples_of_all_replicas() -> None:
    streams = [BalancedStream(WEIGHT, MicroBatches(4, 2, 3, rank), 3, str) for rank in range(3)]
    for step in (0, 7, 5):
        numbers = 2 * step, 2 * step + 1
        parts = [[sample for _, sample in stream.samples_of(number)] for number in numbers for stream in streams]
        for stream in streams:
            assert stream.global_batch(step) == parts
            assert [stream.key(number) for number in numbers] == [str(parts)] * 2


SIZES = np.array([[3, 10], [3, 10], [1, 40], [1, 5], [9, 1], [1, 1], [1, 1], [1, 1]], np.int32)


@pytest.mark.parametrize(
    ("most", "batch", "expected"),
    [
        ([9, 45], 8, [[0, 1], [2, 3], [4], [5, 6, 7]]),
        ([9, 45], 2, [[0, 1], [2, 3], [4], [5, 6], [7]]),
        ([100, 40], 8, [[0, 1], [2], [3, 4, 5, 6, 7]]),
    ],
    ids=["both sizes", "number", "second size"],
)
def test_consecutive_samples_fill_a_batch(most: list[int], batch: int, expected: list[list[int]]) -> None:
    """By hand: a batch ends where one more sample would exceed a size, or the number of samples."""
    shard = PackedShard(SIZES, most, batch, "key", "setting")
    assert [list(shard.samples(number)) for number in range(shard.batches)] == expected
    assert [shard.valid(number) for number in range(shard.batches)] == [len(samples) for samples in expected]


def test_replicas_have_equally_many_batches_and_every_sample_once() -> None:
    shards = [PackedShard(SIZES, [9, 45], 8, "key", "setting", 3, rank) for rank in range(3)]
    assert [shard.batches for shard in shards] == [2, 2, 2]
    samples = [sample for shard in shards for number in range(2) for sample in shard.samples(number)]
    assert sorted(samples) == list(range(8))


def test_a_sample_that_is_too_large_is_named() -> None:
    with pytest.raises(DataError, match=r"sample 2 of the evaluation is too large \(1, 40\) for setting"):
        PackedShard(SIZES, [9, 39], 8, "key", "setting")
