"""The order in which blocks are sampled, planned for and gathered; what a run holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.data import GraphData
from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.sampling import SeedBatch, largest_shape
from common.data.batches import Batch, HostBatch
from common.data.prefetch import Prefetcher
from tests.benchmarks.rgat.sample_oracle import small_graph
from tests.benchmarks.rgat.test_rgat_workload import built
from tests.capturable import Capturable

FANOUTS = (3, 2, 2)


def first_seed(block: SampledBlock) -> int:
    return int(block.nodes[block.shape.node_offsets(block.shape.hops)[block.shape.schema.seed_type]])


class _Noted:
    """Features that note what is asked of them."""

    name, width = "noted", 2

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []

    def plan(self, block: SampledBlock) -> int:
        self.notes.append(("plan", first_seed(block)))
        return first_seed(block)

    def gather(self, block: SampledBlock, plan: Any, out_NF: Tensor) -> None:
        assert plan == first_seed(block)
        self.notes.append(("gather", plan))
        out_NF.fill_(float(plan))

    def close(self) -> None:
        pass


def test_a_block_is_planned_for_a_batch_before_it_is_gathered() -> None:
    graph, features = small_graph(2), _Noted()
    sources = GraphData(graph, features, FANOUTS, sampler_reference)
    sampler = sources.sampler(largest_shape(graph, 4, FANOUTS))

    def batches() -> Iterator[tuple[SeedBatch, Tensor]]:
        for first in range(4):
            seeds = torch.arange(first, first + 4, dtype=torch.int32)
            yield SeedBatch(seeds, 4, torch.tensor(first)), torch.full((4,), first)

    found = [tensors for _, tensors in sources.tensors(sampler, batches())]
    assert [int(tensors["label"][0]) for tensors in found] == [0, 1, 2, 3]
    assert [int(tensors["seed"]) for tensors in found] == [0, 1, 2, 3]
    assert [float(tensors["features"][0, 0]) for tensors in found] == [0, 1, 2, 3]
    order = [("plan", 0)]
    for number in range(1, 4):
        order += [("plan", number), ("gather", number - 1)]
    assert features.notes == [*order, ("gather", 3)]


def test_the_example_of_the_data_is_given_away(data_of: Any) -> None:
    workload = built()
    source = workload.open_data(data_of("rgat"))
    (example,) = workload.examples_of_data()
    assert example.key == source.shape
    assert list(workload.examples_of_data()) == []
    workload.close()


def test_the_loss_and_its_gradients_can_be_captured() -> None:
    workload = built()
    (example,) = workload.example_batches()
    workload.loss(example).total.backward()  # tables of host numbers go to the device in the first pass
    with Capturable():
        workload.loss(example).total.backward()


class _Stream:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


def test_the_first_batches_of_a_run_wait_for_what_opened_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    current, side = _Stream(), _Stream()
    monkeypatch.setattr("torch.cuda.current_stream", lambda: current)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.Event", lambda: type("Event", (), {"record": lambda self: None})())

    def read() -> Iterator[HostBatch]:
        assert side.waited == [current]
        yield HostBatch({}, 1, 0)

    prefetcher = Prefetcher(lambda host: Batch({}, 1), 1, side)  # type: ignore[arg-type]
    prefetcher.begin(read())
    assert prefetcher.take() is not None
    prefetcher.begin(iter(()))  # a block that follows at once does not hold the training up
    assert side.waited == [current]
