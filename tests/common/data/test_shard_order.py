"""The order of shards, and the count of micro-batches."""

import itertools
from collections import Counter

import numpy as np
import pytest

from common.data.batches import Block
from common.data.order import MicroBatches
from common.data.shard_order import ShardStream, Turn, shard_sizes
from common.errors import ConfigError


def turns(stream, number):
    """The first ``number`` turns of the stream, taken lane by lane in the order of the stream."""
    per_lane = [[stream.turn(lane, i) for i in range(-(-number // stream.lanes))] for lane in range(stream.lanes)]
    return list(itertools.chain.from_iterable(zip(*per_lane, strict=True)))[:number]


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 7, 8, 30])
def test_every_shard_is_read_once_per_epoch(lanes):
    read = Counter((turn.epoch, turn.shard) for turn in turns(ShardStream(70, 7, lanes, seed=5), 4 * 7))
    assert read == Counter(itertools.product(range(4), range(7)))


@pytest.mark.parametrize("lanes", [2, 3, 30])
def test_lanes_share_the_stream_that_one_lane_reads(lanes):
    assert turns(ShardStream(70, 7, lanes, seed=5), 50) == turns(ShardStream(70, 7, 1, seed=5), 50)


@pytest.mark.parametrize(("larger_first", "rows"), [(True, [3, 3, 2, 2]), (False, [2, 2, 3, 3])])
def test_the_first_or_the_last_shards_have_one_row_more(larger_first, rows):
    stream = ShardStream(10, 4, larger_first=larger_first)
    assert [stream.rows_of(shard) for shard in range(4)] == rows


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_row_is_found_where_reading_up_to_it_ends(lane):
    stream = ShardStream(11, 4, lanes=3, seed=2)
    walked = [(number, row) for number in range(9) for row in range(stream.turn(lane, number).rows)]
    assert [stream.find(lane, row) for row in range(len(walked))] == walked


def test_the_seed_decides_the_order_of_shards():
    first, again, other = (turns(ShardStream(100, 50, 1, seed), 100) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_epochs_have_orders_of_their_own():
    order = [turn.shard for turn in turns(ShardStream(100, 50, 1), 100)]
    assert order[:50] != order[50:]


def test_rows_are_shuffled_anew_in_every_reading_of_every_shard():
    stream = ShardStream(100, 2, seed=3)
    readings = [Turn(0, 0, 50), Turn(0, 1, 50), Turn(1, 0, 50), Turn(1, 1, 50)]
    orders = [tuple(stream.row_generator(turn).permutation(50)) for turn in readings]
    assert len({*orders, tuple(ShardStream(50, 50, seed=3).permutation(0))}) == 5
    assert tuple(stream.row_generator(readings[0]).permutation(50)) == orders[0]


def test_permutations_that_are_handed_out_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        ShardStream(10, 5).permutation(0)[0] = 1


@pytest.mark.parametrize(
    ("values", "message"),
    [((10, 0, 1), "shards=0"), ((10, 2, 0), "lanes=0"), ((3, 4, 1), "3 rows do not fill 4 shards")],
)
def test_an_impossible_stream_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ShardStream(*values)


@pytest.mark.parametrize(("micro_batch", "accumulation", "replicas"), [(4, 1, 1), (3, 2, 1), (2, 3, 5)])
def test_a_block_ends_with_the_global_batch_that_reaches_its_last_sample(micro_batch, accumulation, replicas):
    ours = MicroBatches(micro_batch, accumulation, replicas, replicas - 1)

    def until(samples: int) -> int:
        """Micro-batches of a replica until ``samples`` are reached, global batch by global batch."""
        steps = 0
        while steps * micro_batch * accumulation * replicas < samples:
            steps += 1
        return steps * accumulation

    for start, count in ((0, 100), (0, 120), (100, 77), (177, 1), (120, 240)):
        block = Block(0, 1, 0, start, count)
        assert ours.first(block) == until(start)
        assert ours.count(block) == until(start + count) - until(start)


def test_every_lane_belongs_to_one_micro_batch_of_a_global_batch():
    lanes = [MicroBatches(1, 3, 4, replica).lane(step) for step in range(3) for replica in range(4)]
    assert lanes == list(range(12))


def test_random_seeds_do_not_depend_on_how_many_ranks_share_a_global_batch():
    def seeds(accumulation, replicas):
        ranks = [MicroBatches(1, accumulation, replicas, replica) for replica in range(replicas)]
        return [rank.random_seed(9, number) for number in range(5 * accumulation) for rank in ranks]

    assert seeds(1, 6) == seeds(6, 1) == seeds(2, 3)
    assert len(set(seeds(6, 1))) == 30
    assert all(0 <= seed < 2**63 for seed in seeds(6, 1))
    assert MicroBatches(1).random_seed(9, 0) != MicroBatches(1).random_seed(10, 0)


def test_random_seeds_fill_63_bits():
    seeds = np.array([MicroBatches(1).random_seed(0, number) for number in range(2000)])
    bits = (seeds[:, None] >> np.arange(63)) & 1
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.06  # five standard deviations


@pytest.mark.parametrize(
    ("values", "message"),
    [((0, 1, 1, 0), "micro_batch=0"), ((1, 0, 1, 0), "accumulation=0"), ((1, 1, 2, 2), "replica 2 lies outside of 2")],
)
def test_impossible_micro_batches_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        MicroBatches(*values)


@pytest.mark.parametrize("larger_first", [True, False])
def test_the_stream_has_shards_of_the_sizes_that_were_written(larger_first):
    stream = ShardStream(11, 4, larger_first=larger_first)
    assert [stream.rows_of(shard) for shard in range(4)] == shard_sizes(11, 4, larger_first).tolist()
