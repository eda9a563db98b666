"""The order of samples: once per epoch, for any number of replicas, from any position."""

import itertools

import pytest

from common.data.batches import Block
from common.data.order import EpochStream, EvalShard
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


def test_replicas_see_what_accumulation_sees():
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


def test_impossible_streams_are_refused():
    with pytest.raises(ConfigError, match="replica 2 lies outside of 2"):
        EpochStream(SAMPLES, 1, 1, 2, 2)
    with pytest.raises(ConfigError, match="micro_batch=0"):
        EpochStream(SAMPLES, 0)
    with pytest.raises(ConfigError, match="batch=0"):
        EvalShard(SAMPLES, 0)
