"""Reading shards ahead of their use."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import numpy as np
import pytest

from common.data.batches import Block
from common.data.order import MicroBatches
from common.data.shard_streams import ShardOrder, ShardStreams, Turn, shard_sizes
from common.errors import ConfigError, DataError

DEADLINE = 200.0  # seconds


class Shards:
    """Made-up shards, read a row at a time; shard n consists of (epoch, shard, row)."""

    def __init__(self, broken=None):
        self.broken = broken
        self.changed = threading.Condition()
        self.opened = []
        self.most_at_once = 0

    def open(self, turn):
        reader = Rows(self, turn)
        self.opened.append(reader)
        return reader

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE)


class Rows:
    """One of them on its way."""

    def __init__(self, shards, turn):
        self.shards, self.turn = shards, turn
        self.rows_read = 0
        self.hinted = self.closed = False

    @property
    def shard(self):
        turn = self.turn
        done = self.rows_read == turn.rows
        return [(turn.epoch, turn.shard, row) for row in range(turn.rows)] if done else None

    def hint(self):
        self.hinted = True

    def advance(self):
        assert not self.closed
        if self.shards.broken is not None and (self.turn.epoch, self.turn.shard) == self.shards.broken[:2]:
            raise self.shards.broken[2]
        with self.shards.changed:
            self.rows_read += 1
            begun = sum(reader.rows_read > 0 for reader in self.shards.opened)
            self.shards.most_at_once = max(self.shards.most_at_once, begun)
            self.shards.changed.notify_all()

    def close(self):
        self.closed, self.rows_read = True, 0


@pytest.fixture
def read():
    """Return a function that opens readers of synthetic shards; all are closed after the test."""
    opened = []

    def open_streams(order, streams, broken=None):
        shards = Shards(broken)
        opened.append(ShardStreams(order, streams, shards.open))
        return opened[-1], shards

    yield open_streams
    for streams in opened:
        streams.close()


def rows_of(pieces):
    return [row for piece in pieces for row in piece.shard[piece.start : piece.stop]]


def stream_in_order(order, stream, count):
    """The rows that a stream reads, by the definition of the stream."""
    turns = (order.turn(stream, number) for number in range(count))
    return [(turn.epoch, turn.shard, row) for turn in turns for row in range(turn.rows)][:count]


@pytest.mark.parametrize("count", [1, 3, 4, 9, 23])
def test_a_stream_reads_its_shards_wholly_and_across_their_ends(read, count):
    order = ShardOrder(22, 5, streams=2, seed=1)
    streams, _ = read(order, [0, 1])
    got = {0: [], 1: []}
    for first in range(0, 10 * count, count):
        for stream in got:
            got[stream] += rows_of(streams.take(stream, first, count))
    assert got == {stream: stream_in_order(order, stream, 10 * count) for stream in got}


def test_a_stream_starts_anywhere(read):
    order = ShardOrder(22, 5, streams=2, seed=1)
    streams, _ = read(order, [1])
    for first in (17, 3, 20, 0):
        assert rows_of(streams.take(1, first, 5)) == stream_in_order(order, 1, 30)[first : first + 5]


def test_streams_that_stand_where_they_should_are_not_read_again(read):
    streams, shards = read(ShardOrder(40, 2, streams=2), [0, 1])
    for stream in (0, 1):
        streams.take(stream, 0, 7)
    before = len(shards.opened)
    streams.start([7, 7])
    streams.take(0, 7, 7)
    assert len(shards.opened) == before


def test_the_first_shards_of_all_streams_are_hinted_together(read):
    streams, shards = read(ShardOrder(40, 4, streams=3), [0, 1, 2])
    streams.start([0, 0, 0])
    assert [reader.hinted for reader in shards.opened] == [True, False] * 3


def test_the_next_shard_is_there_when_half_of_the_current_one_is_used(read):
    streams, shards = read(ShardOrder(40, 2, seed=4), [0])
    streams.take(0, 0, 10)
    streams.read_ahead()
    following = shards.opened[1]
    shards.wait_for(lambda: following.rows_read == 20)


def test_at_most_two_shards_of_a_stream_are_in_memory(read):
    streams, shards = read(ShardOrder(60, 6, seed=4), [0])
    for first in range(0, 100, 5):
        streams.take(0, first, 5)
        streams.read_ahead()
        following = shards.opened[-1]
        shards.wait_for(lambda following=following: following.rows_read == 10)
    assert shards.most_at_once == 2
    assert sum(not reader.closed for reader in shards.opened) == 2


@pytest.mark.parametrize("error", [DataError("row 3 is damaged"), ZeroDivisionError("a mistake")])
def test_errors_of_the_reading_thread_are_raised_by_take(read, error):
    order = ShardOrder(20, 2, seed=4)
    second = order.turn(0, 1)
    streams, _ = read(order, [0], broken=(second.epoch, second.shard, error))
    streams.take(0, 0, 10)
    with pytest.raises(type(error), match=str(error)):
        streams.take(0, 10, 1)


def test_closing_ends_the_thread_and_closes_all_shards():
    shards = Shards()
    streams = ShardStreams(ShardOrder(40, 4, streams=2), [0, 1], shards.open)
    streams.take(0, 0, 5)
    streams.close()
    assert all(reader.closed for reader in shards.opened)
    assert not [thread for thread in threading.enumerate() if thread.name == "shards"]


def test_closed_streams_give_no_rows():
    streams = ShardStreams(ShardOrder(40, 4), [0], Shards().open)
    streams.close()
    with pytest.raises(RuntimeError, match="after the streams were closed"):
        streams.take(0, 0, 1)


def turns(order, number):
    """The first ``number`` turns, taken from one stream after the other."""
    per_stream = [
        [order.turn(stream, i) for i in range(-(-number // order.streams))] for stream in range(order.streams)
    ]
    return list(itertools.chain.from_iterable(zip(*per_stream, strict=True)))[:number]


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 7, 8, 30])
def test_every_shard_is_read_once_per_epoch(streams):
    read = Counter((turn.epoch, turn.shard) for turn in turns(ShardOrder(70, 7, streams, seed=5), 4 * 7))
    assert read == Counter(itertools.product(range(4), range(7)))


@pytest.mark.parametrize("streams", [2, 3, 30])
def test_streams_together_read_the_order_that_one_stream_reads(streams):
    assert turns(ShardOrder(70, 7, streams, seed=5), 50) == turns(ShardOrder(70, 7, 1, seed=5), 50)


@pytest.mark.parametrize(("larger_first", "rows"), [(True, [3, 3, 2, 2]), (False, [2, 2, 3, 3])])
def test_the_first_or_the_last_shards_have_one_row_more(larger_first, rows):
    order = ShardOrder(10, 4, larger_first=larger_first)
    assert [order.rows_of(shard) for shard in range(4)] == rows


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_find_agrees_with_counting_rows_one_by_one(stream):
    order = ShardOrder(11, 4, streams=3, seed=2)
    walked = [(number, row) for number in range(9) for row in range(order.turn(stream, number).rows)]
    assert [order.find(stream, row) for row in range(len(walked))] == walked


def test_the_seed_decides_the_order_of_shards():
    first, again, other = (turns(ShardOrder(100, 50, 1, seed), 100) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_epochs_have_orders_of_their_own():
    order = [turn.shard for turn in turns(ShardOrder(100, 50, 1), 100)]
    assert order[:50] != order[50:]


def test_rows_are_shuffled_anew_in_every_reading_of_every_shard():
    order = ShardOrder(100, 2, seed=3)
    readings = [Turn(0, 0, 50), Turn(0, 1, 50), Turn(1, 0, 50), Turn(1, 1, 50)]
    orders = [tuple(order.row_generator(turn).permutation(50)) for turn in readings]
    assert len({*orders, tuple(ShardOrder(50, 50, seed=3).permutation(0))}) == 5
    assert tuple(order.row_generator(readings[0]).permutation(50)) == orders[0]


def test_permutations_that_are_handed_out_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        ShardOrder(10, 5).permutation(0)[0] = 1


@pytest.mark.parametrize(
    ("values", "message"),
    [((10, 0, 1), "shards=0"), ((10, 2, 0), "streams=0"), ((3, 4, 1), "3 rows do not fill 4 shards")],
)
def test_an_impossible_stream_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ShardOrder(*values)


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


def test_every_stream_belongs_to_one_micro_batch_of_a_global_batch():
    streams = [MicroBatches(1, 3, 4, replica).stream(step) for step in range(3) for replica in range(4)]
    assert streams == list(range(12))


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
    order = ShardOrder(11, 4, larger_first=larger_first)
    assert [order.rows_of(shard) for shard in range(4)] == shard_sizes(11, 4, larger_first).tolist()
