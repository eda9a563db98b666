"""R-GAT's data: seeds of training and evaluation, and the order in which blocks are sampled, planned and gathered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.rgat.data import NO_LABEL, EvaluationSeeds, GraphData, TrainingSeeds
from benchmarks.rgat.graph import SampledBlock
from benchmarks.rgat.ops.sample.reference import sampler_reference
from benchmarks.rgat.prepared import Labelled
from benchmarks.rgat.sampling import SeedBatch, largest_shape
from common.data.batches import Batch, Block, HostBatch
from common.data.order import MicroBatches
from common.data.prefetch import Prefetcher
from common.errors import ConfigError
from common.mlperf.schedules import SCHEDULES
from tests.benchmarks.rgat.sample_oracle import small_graph

CPU = torch.device("cpu")
TRAIN = Labelled(np.arange(1000, 1103, dtype=np.int32), (np.arange(103) % 7).astype(np.int16))


def stream(accumulation: int = 1, replicas: int = 1, replica: int = 0, seed: int = 5) -> TrainingSeeds:
    return TrainingSeeds(TRAIN, MicroBatches(4, accumulation, replicas, replica), seed, CPU)


def real(source: TrainingSeeds, number: int) -> list[int]:
    batch, label = source.batch(number)
    assert len(batch.seeds) == len(label) == source.micro_batches.micro_batch
    assert batch.seeds.dtype == torch.int32
    assert [each >= 0 for each in label.tolist()] == [place < batch.count for place in range(len(label))]
    assert label[: batch.count].tolist() == [(each - 1000) % 7 for each in batch.seeds[: batch.count].tolist()]
    return batch.seeds[: batch.count].tolist()


def test_each_stream_visits_its_seeds_in_a_new_order_per_epoch():
    source = stream(replicas=3, replica=1)  # 34 seeds of a stream: 8 batches of 4 and one of 2
    assert (source.stream_seeds, source.steps_of_epoch) == (34, 9)
    epochs = [[real(source, epoch * 9 + step) for step in range(9)] for epoch in range(2)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4] * 8 + [2]
        assert sorted(itertools.chain(*epoch)) == list(range(1034, 1068))
    assert epochs[0] != epochs[1]
    assert source.batch(8)[1].tolist()[2:] == [NO_LABEL] * 2


def test_a_block_is_continued_from_a_position_and_over_the_end_of_an_epoch():
    source = stream()
    block = Block(0, 1, 0, 24 * 4, 5 * 4)
    whole = [batch.seeds.tolist() for batch, _ in source.batches(block)]
    assert len(whole) == 5
    assert [batch.seeds.tolist() for batch, _ in source.batches(block, 2)] == whole[2:]
    assert [len(real(source, number)) for number in range(24, 29)] == [4, 3, 4, 4, 4]  # 103 seeds are 26 batches


def test_what_is_drawn_differs_from_batch_to_batch_and_run_to_run():
    drawn = [int(stream(seed=seed).batch(number)[0].seed) for seed in (1, 2) for number in range(30)]
    assert len(set(drawn)) == 60


def test_an_epoch_of_the_schedule_has_the_streams_steps():
    schedule = SCHEDULES["rgat"](3 * 4 * 2, train_samples=1003, ranks=6, last_epoch=1)
    labelled = Labelled(np.arange(1003, dtype=np.int32), np.zeros(1003, dtype=np.int16))
    source = TrainingSeeds(labelled, MicroBatches(4, 2, 3, 0), 0, CPU)
    assert schedule.period == source.steps_of_epoch * 24


def test_too_few_seeds_are_an_error_that_says_so():
    with pytest.raises(ConfigError, match="103 training seeds over 30 micro-batches of a global batch are only 3"):
        TrainingSeeds(TRAIN, MicroBatches(4, 30, 1, 0), 0, CPU)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_evaluation_seed_comes_once_over_any_number_of_ranks(ranks):
    found, batches = [], set()
    for rank in range(ranks):
        seeds = EvaluationSeeds(TRAIN, 8, 4, ranks, rank, 3, CPU)
        given = list(seeds.batches())
        assert len(given) == 4 // ranks * 4  # each of 4 parts: 25 or 26 seeds
        for batch, label in given:
            found += batch.seeds[: batch.count].tolist()
            assert (label >= 0).sum() == batch.count
            batches.add((tuple(batch.seeds[: batch.count].tolist()), int(batch.seed)))
    assert sorted(found) == TRAIN.nodes.tolist()
    alone = EvaluationSeeds(TRAIN, 8, 4, 1, 0, 3, CPU)
    assert batches == {(tuple(b.seeds[: b.count].tolist()), int(b.seed)) for b, _ in alone.batches()}


def test_ranks_that_do_not_divide_the_parts_are_refused():
    with pytest.raises(ConfigError, match="3 do not divide the 4 parts"):
        EvaluationSeeds(TRAIN, 8, 4, 3, 0, 3, CPU)


FANOUTS = (3, 2, 2)


def first_seed(block: SampledBlock) -> int:
    return int(block.nodes[block.shape.node_offsets(block.shape.hops)[block.shape.schema.seed_type]])


class _RecordedFeatures:
    """Features that record their calls."""

    name, width = "recorded", 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def plan(self, block: SampledBlock) -> int:
        self.calls.append(("plan", first_seed(block)))
        return first_seed(block)

    def gather(self, block: SampledBlock, plan: Any, out_NF: Tensor) -> None:
        assert plan == first_seed(block)
        self.calls.append(("gather", plan))
        out_NF.fill_(float(plan))

    def close(self) -> None:
        pass


def test_a_block_is_planned_for_a_batch_before_it_is_gathered():
    graph, features = small_graph(2), _RecordedFeatures()
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
    assert features.calls == [*order, ("gather", 3)]


class _Stream:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


def test_the_first_batches_of_a_run_wait_for_what_opened_the_data(monkeypatch):
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
