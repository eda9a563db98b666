"""The order of samples: once per epoch, for any number of replicas, from any position."""

import itertools

import numpy as np
import pytest

from common.data.batches import Block
from common.data.order import EpochStream, EvalShard, GroupedShard, GroupedStream, MicroBatches, permutation
from common.errors import ConfigError

SAMPLES = 29


def blocks(epochs):
    return [Block(i, i * epochs + 1, epochs, i * epochs * SAMPLES, epochs * SAMPLES) for i in range(3)]


def step_order(replicas, accumulation, block):
    """All (epoch, sample) of ``block``, step by step, micro-batch by micro-batch, replica by replica."""
    streams = [EpochStream(SAMPLES, 4, accumulation, replicas, replica, seed=5) for replica in range(replicas)]
    positions = range(streams[0].micro_batches(block))
    return list(itertools.chain(*(s.samples(block, p) for p in positions for s in streams)))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_sample_comes_once_per_epoch(replicas):
    stream = [pair for block in blocks(2) for pair in step_order(replicas, 1, block)]
    for epoch in range(6):
        assert sorted(sample for e, sample in stream if e == epoch) == list(range(SAMPLES))
    assert len(stream) == -(-6 * SAMPLES // (4 * replicas)) * 4 * replicas


def test_replicas_read_the_samples_of_one_rank_that_accumulates():
    for block in blocks(1):
        assert step_order(2, 1, block) == step_order(1, 2, block)


def test_blocks_end_with_the_step_that_reaches_their_last_sample():
    stream = EpochStream(SAMPLES, 4, 2, 1)
    assert [stream.micro_batches(block) for block in blocks(1)] == [8, 8, 6]  # steps of 8: 29, 58, 87 -> 4, 8, 11
    assert [stream.first_micro_batch(block) for block in blocks(1)] == [0, 8, 16]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(EpochStream(SAMPLES, 1, seed=seed).permutation(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize("replicas", [1, 3, 7, 8])
@pytest.mark.parametrize("samples", [5, 50, 50_000])
def test_eval_shards_are_the_set(replicas, samples):
    shards = [EvalShard(samples, 16, replicas, replica) for replica in range(replicas)]
    assert list(itertools.chain(*(range(s.start, s.end) for s in shards))) == list(range(samples))
    assert len({s.batches for s in shards}) == 1
    assert sum(s.valid(batch) for s in shards for batch in range(s.batches)) == samples
    assert all(s.valid(batch) <= 16 for s in shards for batch in range(s.batches))


@pytest.mark.parametrize("samples", [2, 5, 12, 50])
@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_eval_shards_of_nodes_are_the_set(nodes, samples):
    shards = [EvalShard(samples, 2, 4, replica, nodes, node) for node in range(nodes) for replica in range(4)]
    found = [s.node + nodes * at for s in shards for batch in range(s.batches) for at in s.samples(batch)]
    assert sorted(found) == list(range(samples))
    assert len({s.batches for s in shards}) == 1


def test_impossible_streams_are_refused():
    with pytest.raises(ConfigError, match="replica 2 lies outside of 2"):
        EpochStream(SAMPLES, 1, 1, 2, 2)
    with pytest.raises(ConfigError, match="micro_batch=0"):
        EpochStream(SAMPLES, 0)
    with pytest.raises(ConfigError, match="batch=0"):
        EvalShard(SAMPLES, 0)


GROUPS = np.array([0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0], np.int64)  # 7 and 4: with 3 a micro-batch 3 + 2 of them
SIZE, PASS = 3, 5


def stream(accumulation=1, replicas=1, replica=0, seed=4, **others):
    return GroupedStream(GROUPS, MicroBatches(SIZE, accumulation, replicas, replica), seed, **others)


def one_by_one(permutation):
    """The micro-batches of a pass, filled sample by sample: a list begins where its first sample stands."""
    begun, open_ = [], {}
    for sample in permutation:
        group = GROUPS[sample]
        if group not in open_ or len(open_[group]) == SIZE:
            open_[group] = []
            begun.append(open_[group])
        open_[group].append(int(sample))
    return begun


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_pass_has_each_sample_once_and_one_group_a_micro_batch(epoch):
    found = [stream().samples_of(epoch * PASS + position) for position in range(PASS)]
    assert all(pair[0] == epoch for samples in found for pair in samples)
    batches = [[sample for _, sample in samples] for samples in found]
    assert sorted(itertools.chain(*batches)) == list(range(len(GROUPS)))
    assert sorted(map(len, batches)) == [1, 1, 3, 3, 3]
    assert all(len({int(GROUPS[sample]) for sample in batch}) == 1 for batch in batches)


def test_micro_batches_stand_where_their_first_samples_stand():
    for epoch in range(3):
        expected = one_by_one(permutation(len(GROUPS), 4, epoch))
        assert [batch.tolist() for batch in stream().cut(epoch)] == expected


def test_passes_and_seeds_have_orders_of_their_own():
    orders = {str([batch.tolist() for batch in stream(seed=seed).cut(epoch)]) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4


def test_replicas_divide_the_batches_of_one_rank_that_accumulates():
    whole = stream(accumulation=4)
    for step in range(6):
        mine = [whole.samples_of(4 * step + part) for part in range(4)]
        seeds = [whole.random_seed(4 * step + part) for part in range(4)]
        parts = [stream(2, 2, replica) for replica in range(2)]
        assert [replica.samples_of(2 * step + part) for part in range(2) for replica in parts] == mine
        assert [replica.random_seed(2 * step + part) for part in range(2) for replica in parts] == seeds
    assert len({whole.random_seed(number) for number in range(24)}) == 24


def test_any_micro_batch_is_found_without_those_before_it():
    whole, resumed = stream(2), stream(2)
    order = [whole.samples_of(number) for number in range(40)]
    assert [resumed.samples_of(number) for number in (39, 7, 23)] == [order[39], order[7], order[23]]


def test_blocks_of_groups_end_with_the_step_that_reaches_their_last_sample():
    blocks = [Block(i, i + 1, 1, i * len(GROUPS), len(GROUPS)) for i in range(3)]
    for replica in range(2):
        found = stream(2, 2, replica)  # steps of 12 nominal samples: 11, 22 and 33 are reached by 1, 2 and 3
        assert [found.micro_batches(block) for block in blocks] == [2, 2, 2]
        assert [found.first_micro_batch(block) for block in blocks] == [0, 2, 4]


def test_the_key_is_that_of_the_samples():
    found = stream(key_of=lambda samples: int(GROUPS[samples[0]]))
    for number in range(PASS):
        assert found.key(number) == GROUPS[found.samples_of(number)[0][1]]


def test_nothing_to_order_is_refused():
    with pytest.raises(ConfigError, match="train_samples=0"):
        GroupedStream(np.zeros(0, np.int64), MicroBatches(1), 0)


KEYS = ["wide", "high", "wide", "wide", "high", "wide", "wide"]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_shards_are_the_set_in_batches_of_one_key(replicas):
    shards = [GroupedShard(KEYS, 2, replicas, replica) for replica in range(replicas)]
    assert {shard.batches for shard in shards} == {-(-4 // replicas)}
    seen = []
    for shard in shards:
        for batch in range(shard.batches):
            samples = shard.samples(batch)
            assert shard.valid(batch) == len(samples) <= 2
            assert all(KEYS[sample] == shard.key(batch) for sample in samples)
            assert shard.key(batch) in KEYS
            seen += samples
    assert sorted(seen) == list(range(len(KEYS)))


def test_impossible_shards_are_refused():
    with pytest.raises(ConfigError, match="replica 2 lies outside of 2"):
        GroupedShard(KEYS, 2, 2, 2)
    with pytest.raises(ConfigError, match="eval_samples=0"):
        GroupedShard([], 2)
