"""Room of blocks: bounds against what is sampled, and margins worked by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rgat.graph import BlockShape, Schema
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.sampling import at_most, enough_shape, grown, largest_shape, moments
from tests.benchmarks.rgat.sample_oracle import NODES, graph_of, small_graph

ONE = Schema.augmented(("a", "b"), ("b__to__a",), "a")
LARGEST = BlockShape(ONE, ((4, 0), (4, 20), (50, 80)), ((40, 0), (60, 30)), ((20, 0), (60, 30)))
"""Two hops of two relations: a batch counts 3 * 2 + 2 * 2 + 2 * 2 + 1 numbers."""


def batch(*, nodes: list[int], edges: list[int], rows: list[int], overflow: int = 0) -> list[int]:
    return [*nodes, *edges, *rows, overflow]


def test_bounds_are_fanouts_and_what_the_graph_has() -> None:
    schema = Schema.augmented(("paper", "author"), ("paper__cites__paper", "author__of__paper"), "paper")
    cites = [[0] * 9 for _ in range(100)]
    graph = graph_of(
        schema,
        (100, 7),
        {
            "paper__cites__paper": cites,
            "author__of__paper": [[0]] * 90 + [[]] * 10,
            "paper__rev_of__author": [[5] * 40] * 7,
        },
    )
    shape = largest_shape(graph, 3, (4, 10))
    assert shape.nodes == ((3, 0), (15, 7), (100, 7))
    assert shape.edges == ((12, 12, 0), (132, 90, 70))
    assert shape.rows == ((12, 7, 0), (100, 7, 70))


def test_there_may_be_room_for_more_seeds_than_nodes() -> None:
    assert largest_shape(small_graph(), 100, (2,)).nodes == ((0, 100, 0), (3, 100, 30))


@pytest.mark.parametrize("fanouts", [(2, 2), (16, 16, 16)], ids=str)
def test_no_batch_exceeds_the_bounds(fanouts: tuple[int, ...]) -> None:
    graph = small_graph()
    sampler = sampler_reference(graph, fanouts, largest_shape(graph, 9, fanouts))
    for seed in range(5):
        seeds = torch.randperm(NODES[1], generator=torch.Generator().manual_seed(seed))[:9].int()
        assert sampler(seeds, 9, torch.tensor(seed)).overflow.item() == 0


def test_room_is_the_mean_and_deviations_of_all_ranks() -> None:
    first = batch(nodes=[4, 0, 4, 10, 20, 30], edges=[12, 0, 30, 9], rows=[10, 0, 20, 3])
    second = batch(nodes=[4, 0, 4, 14, 21, 30], edges=[16, 0, 30, 9], rows=[14, 0, 20, 3])
    together = moments([first]) + moments([second])
    assert torch.equal(together, moments([first, second]))
    shape = enough_shape(together, LARGEST, 2.0)
    # Of 10 and 14 the mean is 12 and the deviation 2; of 20 and 21 it is 20.5 and 0.5.
    assert shape.nodes == ((4, 0), (4, 16), (22, 30))
    assert shape.edges == ((18, 0), (30, 9))
    assert shape.rows == ((16, 0), (20, 3))


def test_room_is_bounded_grows_with_hops_and_is_never_none_where_there_may_be_something() -> None:
    few = batch(nodes=[1, 0, 1, 0, 1, 0], edges=[0, 0, 0, 0], rows=[0, 0, 0, 0])
    shape = enough_shape(moments([few]), LARGEST, 5.0)
    assert shape.nodes == ((4, 0), (4, 1), (4, 1))
    assert shape.edges == shape.rows == ((1, 0), (1, 1))
    wild = batch(nodes=[4, 0, 4, 20, 50, 80], edges=[40, 0, 60, 30], rows=[20, 0, 60, 30])
    assert enough_shape(moments([few, wild]), LARGEST, 9.0) == LARGEST


def test_rows_are_no_more_than_edges_or_nodes() -> None:
    some = [batch(nodes=[4, 0, 4, 5, 9, 9], edges=[30, 0, 30, 9], rows=[rows, 0, rows, 3]) for rows in (1, 5)]
    assert enough_shape(moments(some), LARGEST, 5.0).rows == ((5, 0), (9, 3))


def test_batches_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no batch was sampled"):
        enough_shape(torch.zeros(2 * LARGEST.counts + 1, dtype=torch.int64), LARGEST, 5.0)
    cut = batch(nodes=[4, 0, 4, 5, 9, 9], edges=[30, 0, 30, 9], rows=[1, 0, 1, 3], overflow=1)
    with pytest.raises(ValueError, match="exceeded its capacity"):
        enough_shape(moments([cut]), LARGEST, 5.0)


def test_growing_ends_at_the_largest_shape() -> None:
    shape, sizes = at_most(LARGEST, 5), []
    assert shape.nodes[0] == LARGEST.nodes[0]
    assert shape.edges == ((5, 0), (5, 5))
    while shape != LARGEST:
        sizes.append(sum(shape.edges[-1]))
        shape = grown(shape, LARGEST)
    assert sizes == [10, 20, 40, 70]  # and then all 60 and 30


def test_what_is_rare_grows_to_more_than_twice() -> None:
    shape = grown(at_most(LARGEST, 12), LARGEST, 32)
    assert (shape.nodes, shape.edges) == (((4, 0), (4, 20), (32, 32)), ((32, 0), (32, 30)))
    assert grown(shape, LARGEST, 32).edges == ((40, 0), (60, 30))  # twice 32 is more than there can be
