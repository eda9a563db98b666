"""Capacities of padded batches: padding, the largest micro-batch of a global batch, and capacities from sizes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from common.data.balanced_order import BalancedStream
from common.data.capacities import QUANTILES, capacities_of, fitting, largest_sums, train_capacities
from common.data.order import MicroBatches

RANDOM = np.random.default_rng(1)
NODES_P = RANDOM.integers(10, 100, 2000)
SIZES_P2 = np.stack([NODES_P, NODES_P * RANDOM.integers(20, 40, 2000)], 1).astype(np.int32)


def test_capacities_include_padding_and_are_multiples_of_16() -> None:
    assert capacities_of([15, 16, 31, 32]) == (16, 32, 32, 48)


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([15, 31], (16, 32)),
        ([16, 31], (32, 48)),
        ([15, 32], (32, 48)),
        ([31, 48], (64, 96)),
        ([96, 1], (128, 192)),
    ],
    ids=["fits", "first size", "second size", "twice the last", "four times the last"],
)
def test_the_smallest_capacities_that_hold_all_sizes_are_taken(totals: list[int], expected: tuple[int, ...]) -> None:
    assert fitting([(16, 32), (32, 48)], totals) == expected


def test_the_largest_sums_are_those_of_any_micro_batch() -> None:
    sizes_P2 = np.array([[1, 20], [2, 10], [5, 1], [1, 1]], np.int32)
    assert largest_sums(sizes_P2, [[0, 1], [2], [3]]).tolist() == [5, 30]
    assert largest_sums(sizes_P2, [[2, 3], [0], [1]]).tolist() == [6, 20]


@pytest.mark.parametrize(("micro_batch", "streams"), [(4, 1), (4, 16), (16, 8)])
def test_other_global_batches_fit_in_the_same_shares(micro_batch: int, streams: int) -> None:
    weight_P = SIZES_P2[:, 1]
    known = train_capacities(SIZES_P2, weight_P, micro_batch, streams)
    assert known == sorted(known)
    orders = [BalancedStream(weight_P, MicroBatches(micro_batch, streams), seed, str) for seed in range(1, 4)]
    sums = [largest_sums(SIZES_P2, order.global_batch(step)).tolist() for order in orders for step in range(100)]
    found = Counter(fitting(known, each) for each in sums)
    assert found.keys() <= set(known)
    shares = [sum(found[each] for each in known[: number + 1]) / len(sums) for number in range(len(known))]
    assert shares == pytest.approx([*QUANTILES, 1], abs=0.2)
