"""Capacities of blocks, sampling one block in advance, larger blocks after an overflow, and their losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, Schema
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.sampling import (
    BlockSampler,
    SeedBatch,
    at_most,
    enough_shape,
    grown,
    largest_shape,
    moments,
    sampled_moments,
)
from tests.benchmarks.rgat.sample_oracle import NODES, SCHEMA, filled, graph_of, small_graph
from tests.benchmarks.rgat.small_rgat import SMALL, features_of, network

FANOUTS = (3, 2, 2)
GRAPH = small_graph(2)
LARGEST = largest_shape(GRAPH, 8, FANOUTS)
ENOUGH = at_most(LARGEST, max(max(line) for line in LARGEST.edges) - 1)


def batches(count: int, real: int = 8) -> Iterator[SeedBatch]:
    for number in range(count):
        yield SeedBatch(torch.arange(number, number + 8, dtype=torch.int32), real, torch.tensor(100 + number))


@pytest.mark.parametrize("limit", [3, 20])
def test_a_block_that_exceeds_its_capacity_is_sampled_again_with_a_larger_one(limit):
    small = BlockSampler(GRAPH, FANOUTS, sampler_reference, at_most(LARGEST, limit))
    found = list(small.blocks(batches(4)))
    expected = [sampler_reference(GRAPH, FANOUTS, LARGEST)(each.seeds, each.count, each.seed) for each in batches(4)]
    assert [filled(block) for block in found] == [filled(block) for block in expected]
    assert (small.sampled, small.larger) == (4, 4)
    assert all(not int(block.overflow) for block in found)
    assert all(block.shape != small.shape for block in found)


def test_blocks_that_fit_have_the_shape_and_come_one_behind_the_sampler():
    sampler, requested = BlockSampler(GRAPH, FANOUTS, sampler_reference, LARGEST), []

    def given() -> Iterator[SeedBatch]:
        for batch in batches(5):
            requested.append(batch)
            yield batch

    ahead = [len(requested) - number for number, _ in enumerate(sampler.blocks(given()), 1)]
    assert ahead == [1, 1, 1, 1, 0]
    assert (sampler.sampled, sampler.larger) == (5, 0)


def test_all_ranks_leave_the_captured_shape_when_one_must(monkeypatch):
    overflows = []

    def another_rank_overflows_once(overflow: Tensor, operation: object, group: object) -> None:
        overflows.append(int(overflow))
        overflow.fill_(max(int(overflow), int(len(overflows) == 3)))

    monkeypatch.setattr("torch.distributed.all_reduce", another_rank_overflows_once)
    alone = BlockSampler(GRAPH, FANOUTS, sampler_reference, ENOUGH)
    expected = [filled(block) for block in alone.blocks(batches(5))]
    assert alone.larger == 0
    sampler = BlockSampler(GRAPH, FANOUTS, sampler_reference, ENOUGH, cast(dist.ProcessGroup, object()))
    found = list(sampler.blocks(batches(5)))
    assert [block.shape == ENOUGH for block in found] == [True, True, False, True, True]
    assert [filled(block) for block in found] == expected
    assert (overflows, sampler.larger) == ([0] * 5, 1)  # a collective for each batch, whatever becomes of it


def test_measured_sizes_do_not_depend_on_the_first_capacity():
    counts = [sampler_reference(GRAPH, FANOUTS, LARGEST)(b.seeds, b.count, b.seed).counts for b in batches(3)]
    found = sampled_moments(GRAPH, FANOUTS, sampler_reference, 8, batches(3))
    assert found[: LARGEST.counts].tolist() == torch.stack(counts).sum(0).tolist()
    assert found[-1] == 3


def loss_and_gradients(shape: BlockShape, real: int = 8) -> tuple[Tensor, list[Tensor]]:
    """Return loss and gradients of the first batch in a shape, with dropout."""
    (batch,) = batches(1, real)
    block = sampler_reference(GRAPH, FANOUTS, shape)(batch.seeds, batch.count, batch.seed)
    torch.manual_seed(3)
    features = [torch.randn(count, SMALL.feature_size, dtype=torch.float64) for count in NODES]
    x_NF, _ = features_of(block, features)
    model = network(SMALL, SCHEMA, 3, torch.float64).train()
    label = torch.where(torch.arange(8) < real, torch.arange(8) % 5, -1)
    loss = torch.nn.functional.cross_entropy(model(x_NF, block, batch.seed), label, ignore_index=-1)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("real", [8, 5])
def test_the_capacity_of_a_block_changes_neither_loss_nor_gradients(real):
    (batch,) = batches(1, real)
    counts = sampler_reference(GRAPH, FANOUTS, LARGEST)(batch.seeds, batch.count, batch.seed)

    def lines(table: Tensor) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(line) for line in table.tolist())

    tight = BlockShape(SCHEMA, lines(counts.node_counts), lines(counts.edge_counts), lines(counts.row_counts))
    tight = BlockShape(SCHEMA, (LARGEST.nodes[0], *tight.nodes[1:]), tight.edges, tight.rows)
    assert sum(tight.edges[-1]) < sum(LARGEST.edges[-1])
    expected, gradients = loss_and_gradients(tight, real)
    found, others = loss_and_gradients(LARGEST, real)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_another_seed_drops_others():
    (batch,) = batches(1)
    block = sampler_reference(GRAPH, FANOUTS, LARGEST)(batch.seeds, batch.count, batch.seed)
    x_NF, _ = features_of(block, [torch.randn(count, SMALL.feature_size) for count in NODES])
    model = network(SMALL, SCHEMA, 3).train()
    first, second = model(x_NF, block, torch.tensor(1)), model(x_NF, block, torch.tensor(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, model(x_NF, block, torch.tensor(1)))
    model.eval()
    assert torch.equal(model(x_NF, block, torch.tensor(1)), model(x_NF, block, torch.tensor(2)))


# Capacities

ONE = Schema.augmented(("a", "b"), ("b__to__a",), "a")
HAND_MADE = BlockShape(ONE, ((4, 0), (4, 20), (50, 80)), ((40, 0), (60, 30)), ((20, 0), (60, 30)))
"""Two hops of two relations. A batch has 3 * 2 + 2 * 2 + 2 * 2 + 1 counts."""


def counts_of(*, nodes: list[int], edges: list[int], rows: list[int], overflow: int = 0) -> list[int]:
    return [*nodes, *edges, *rows, overflow]


def test_bounds_are_fanouts_and_what_the_graph_has():
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


def test_the_capacity_may_exceed_the_number_of_nodes():
    assert largest_shape(small_graph(), 100, (2,)).nodes == ((0, 100, 0), (3, 100, 30))


@pytest.mark.parametrize("fanouts", [(2, 2), (16, 16, 16)], ids=str)
def test_no_batch_exceeds_the_bounds(fanouts):
    graph = small_graph()
    sampler = sampler_reference(graph, fanouts, largest_shape(graph, 9, fanouts))
    for seed in range(5):
        seeds = torch.randperm(NODES[1], generator=torch.Generator().manual_seed(seed))[:9].int()
        assert sampler(seeds, 9, torch.tensor(seed)).overflow.item() == 0


def test_the_capacity_is_the_mean_and_deviations_of_all_ranks():
    first = counts_of(nodes=[4, 0, 4, 10, 20, 30], edges=[12, 0, 30, 9], rows=[10, 0, 20, 3])
    second = counts_of(nodes=[4, 0, 4, 14, 21, 30], edges=[16, 0, 30, 9], rows=[14, 0, 20, 3])
    together = moments([first]) + moments([second])
    assert torch.equal(together, moments([first, second]))
    shape = enough_shape(together, HAND_MADE, 2.0)
    # Of 10 and 14 the mean is 12 and the deviation 2; of 20 and 21 it is 20.5 and 0.5.
    assert shape.nodes == ((4, 0), (4, 16), (22, 30))
    assert shape.edges == ((18, 0), (30, 9))
    assert shape.rows == ((16, 0), (20, 3))


def test_the_capacity_is_bounded_grows_with_hops_and_is_positive_where_entries_are_possible():
    few = counts_of(nodes=[1, 0, 1, 0, 1, 0], edges=[0, 0, 0, 0], rows=[0, 0, 0, 0])
    shape = enough_shape(moments([few]), HAND_MADE, 5.0)
    assert shape.nodes == ((4, 0), (4, 1), (4, 1))
    assert shape.edges == shape.rows == ((1, 0), (1, 1))
    wild = counts_of(nodes=[4, 0, 4, 20, 50, 80], edges=[40, 0, 60, 30], rows=[20, 0, 60, 30])
    assert enough_shape(moments([few, wild]), HAND_MADE, 9.0) == HAND_MADE


def test_rows_are_no_more_than_edges_or_nodes():
    some = [counts_of(nodes=[4, 0, 4, 5, 9, 9], edges=[30, 0, 30, 9], rows=[rows, 0, rows, 3]) for rows in (1, 5)]
    assert enough_shape(moments(some), HAND_MADE, 5.0).rows == ((5, 0), (9, 3))


def test_batches_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="no batch was sampled"):
        enough_shape(torch.zeros(2 * HAND_MADE.counts + 1, dtype=torch.int64), HAND_MADE, 5.0)
    cut = counts_of(nodes=[4, 0, 4, 5, 9, 9], edges=[30, 0, 30, 9], rows=[1, 0, 1, 3], overflow=1)
    with pytest.raises(ValueError, match="exceeded its capacity"):
        enough_shape(moments([cut]), HAND_MADE, 5.0)


def test_growing_ends_at_the_largest_shape():
    shape, sizes = at_most(HAND_MADE, 5), []
    assert shape.nodes[0] == HAND_MADE.nodes[0]
    assert shape.edges == ((5, 0), (5, 5))
    while shape != HAND_MADE:
        sizes.append(sum(shape.edges[-1]))
        shape = grown(shape, HAND_MADE)
    assert sizes == [10, 20, 40, 70]  # and then all 60 and 30


def test_what_is_rare_grows_to_more_than_twice():
    shape = grown(at_most(HAND_MADE, 12), HAND_MADE, 32)
    assert (shape.nodes, shape.edges) == (((4, 0), (4, 20), (32, 32)), ((32, 0), (32, 30)))
    assert grown(shape, HAND_MADE, 32).edges == ((40, 0), (60, 30))  # twice 32 is more than there can be
