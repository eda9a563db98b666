"""Shapes of batches: capacities, the largest micro-batch of a global batch, and shapes derived from counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.oc20.shapes import BALANCED, QUANTILES, GraphShape, fitting, largest_sums, train_shapes
from common.data.balanced_order import BalancedStream
from common.data.order import MicroBatches

RANDOM = np.random.default_rng(1)
ATOMS_S = RANDOM.integers(10, 100, 2000)
COUNTS_S4 = np.stack([ATOMS_S, ATOMS_S * RANDOM.integers(20, 40, 2000), 900 * ATOMS_S, ATOMS_S // 2], 1).astype(
    np.int32
)


def test_a_shape_has_an_atom_and_an_edge_of_padding_in_multiples_of_16() -> None:
    assert GraphShape.of([15, 16, 999]) == GraphShape(16, 32)
    assert GraphShape.of([16, 15, 999]) == GraphShape(32, 16)
    for totals, holds in (([31, 15], True), ([32, 1], False), ([1, 16], False)):
        assert GraphShape(32, 16).holds(totals) == holds


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([15, 31], (16, 32)),
        ([16, 31], (32, 48)),
        ([15, 32], (32, 48)),
        ([31, 48], (64, 96)),
        ([96, 1], (128, 192)),
    ],
    ids=["fits", "atoms", "edges", "twice the last", "four times the last"],
)
def test_the_smallest_shape_that_holds_all_counts_is_taken(totals: list[int], expected: tuple[int, ...]) -> None:
    found = fitting([GraphShape(16, 32), GraphShape(32, 48)], [*totals, 100, 5])
    assert (found.atoms, found.edges) == expected


def test_the_largest_sums_are_those_of_any_micro_batch() -> None:
    counts_SC = np.array([[1, 20], [2, 10], [5, 1], [1, 1]], np.int32)
    assert largest_sums(counts_SC, [[0, 1], [2], [3]]).tolist() == [5, 30]
    assert largest_sums(counts_SC, [[2, 3], [0], [1]]).tolist() == [6, 20]


@pytest.mark.parametrize(("micro_batch", "streams"), [(4, 1), (4, 16), (16, 8)])
def test_the_shapes_hold_other_global_batches_with_the_same_shares(micro_batch: int, streams: int) -> None:
    shapes = train_shapes(COUNTS_S4, micro_batch, streams)
    assert shapes == sorted(shapes)
    orders = [
        BalancedStream(COUNTS_S4[:, BALANCED], MicroBatches(micro_batch, streams), seed, str) for seed in range(1, 4)
    ]
    sums = [largest_sums(COUNTS_S4, order.global_batch(step)).tolist() for order in orders for step in range(100)]
    found = Counter(fitting(shapes, each) for each in sums)
    assert found.keys() <= set(shapes)
    shares = [sum(found[shape] for shape in shapes[: number + 1]) / len(sums) for number in range(len(shapes))]
    assert shares == pytest.approx([*QUANTILES, 1], abs=0.2)
