"""Blocks one ahead of when they are wanted, with more room where theirs is too small, and what a step makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.graph import BlockShape
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.sampling import BlockSampler, SeedBatch, at_most, largest_shape, sampled_moments
from tests.benchmarks.rgat.sample_oracle import NODES, SCHEMA, filled, small_graph
from tests.benchmarks.rgat.small_rgat import SMALL, features_of, network

FANOUTS = (3, 2, 2)
GRAPH = small_graph(2)
LARGEST = largest_shape(GRAPH, 8, FANOUTS)
ENOUGH = at_most(LARGEST, max(max(line) for line in LARGEST.edges) - 1)


def batches(count: int, real: int = 8) -> Iterator[SeedBatch]:
    for number in range(count):
        yield SeedBatch(torch.arange(number, number + 8, dtype=torch.int32), real, torch.tensor(100 + number))


@pytest.mark.parametrize("limit", [3, 20])
def test_a_block_that_lacks_room_is_sampled_again_with_more(limit: int) -> None:
    small = BlockSampler(GRAPH, FANOUTS, sampler_reference, at_most(LARGEST, limit))
    found = list(small.blocks(batches(4)))
    expected = [sampler_reference(GRAPH, FANOUTS, LARGEST)(each.seeds, each.count, each.seed) for each in batches(4)]
    assert [filled(block) for block in found] == [filled(block) for block in expected]
    assert (small.sampled, small.larger) == (4, 4)
    assert all(not int(block.overflow) for block in found)
    assert all(block.shape != small.shape for block in found)


def test_blocks_that_fit_have_the_shape_and_come_one_behind_the_sampler() -> None:
    sampler, asked = BlockSampler(GRAPH, FANOUTS, sampler_reference, LARGEST), []

    def given() -> Iterator[SeedBatch]:
        for batch in batches(5):
            asked.append(batch)
            yield batch

    ahead = [len(asked) - number for number, _ in enumerate(sampler.blocks(given()), 1)]
    assert ahead == [1, 1, 1, 1, 0]
    assert (sampler.sampled, sampler.larger) == (5, 0)


def test_all_ranks_leave_the_captured_shape_when_one_must(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []

    def another_rank_lacks_room_once(lacking: Tensor, operation: object, group: object) -> None:
        said.append(int(lacking))
        lacking.fill_(max(int(lacking), int(len(said) == 3)))

    monkeypatch.setattr("torch.distributed.all_reduce", another_rank_lacks_room_once)
    alone = BlockSampler(GRAPH, FANOUTS, sampler_reference, ENOUGH)
    expected = [filled(block) for block in alone.blocks(batches(5))]
    assert alone.larger == 0
    sampler = BlockSampler(GRAPH, FANOUTS, sampler_reference, ENOUGH, cast(dist.ProcessGroup, object()))
    found = list(sampler.blocks(batches(5)))
    assert [block.shape == ENOUGH for block in found] == [True, True, False, True, True]
    assert [filled(block) for block in found] == expected
    assert (said, sampler.larger) == ([0] * 5, 1)  # a collective for each batch, whatever becomes of it


def test_what_batches_fill_is_measured_whatever_room_they_begin_with() -> None:
    counts = [sampler_reference(GRAPH, FANOUTS, LARGEST)(b.seeds, b.count, b.seed).counts for b in batches(3)]
    found = sampled_moments(GRAPH, FANOUTS, sampler_reference, 8, batches(3))
    assert found[: LARGEST.counts].tolist() == torch.stack(counts).sum(0).tolist()
    assert found[-1] == 3


def loss_and_gradients(shape: BlockShape, real: int = 8) -> tuple[Tensor, list[Tensor]]:
    """Of the first batch in a shape, with dropout."""
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
def test_the_room_of_a_block_changes_neither_loss_nor_gradients(real: int) -> None:
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


def test_another_seed_drops_others() -> None:
    (batch,) = batches(1)
    block = sampler_reference(GRAPH, FANOUTS, LARGEST)(batch.seeds, batch.count, batch.seed)
    x_NF, _ = features_of(block, [torch.randn(count, SMALL.feature_size) for count in NODES])
    model = network(SMALL, SCHEMA, 3).train()
    first, second = model(x_NF, block, torch.tensor(1)), model(x_NF, block, torch.tensor(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, model(x_NF, block, torch.tensor(1)))
    model.eval()
    assert torch.equal(model(x_NF, block, torch.tensor(1)), model(x_NF, block, torch.tensor(2)))
