"""Reading shards ahead of their use."""

import threading

import pytest

from common.data.shard_lanes import ShardLanes
from common.data.shard_order import ShardStream
from common.errors import DataError

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
    """A function that opens lanes of a stream over made-up shards; all are closed after the test."""
    opened = []

    def open_lanes(stream, lanes, broken=None):
        shards = Shards(broken)
        opened.append(ShardLanes(stream, lanes, shards.open))
        return opened[-1], shards

    yield open_lanes
    for lanes in opened:
        lanes.close()


def rows_of(pieces):
    return [row for piece in pieces for row in piece.shard[piece.start : piece.stop]]


def lane_in_order(stream, lane, count):
    """The rows that a lane reads, by the definition of the stream."""
    turns = (stream.turn(lane, number) for number in range(count))
    return [(turn.epoch, turn.shard, row) for turn in turns for row in range(turn.rows)][:count]


@pytest.mark.parametrize("count", [1, 3, 4, 9, 23])
def test_a_lane_reads_its_shards_wholly_and_across_their_ends(read, count):
    stream = ShardStream(22, 5, lanes=2, seed=1)
    lanes, _ = read(stream, [0, 1])
    got = {0: [], 1: []}
    for first in range(0, 10 * count, count):
        for lane in got:
            got[lane] += rows_of(lanes.take(lane, first, count))
    assert got == {lane: lane_in_order(stream, lane, 10 * count) for lane in got}


def test_a_lane_starts_anywhere(read):
    stream = ShardStream(22, 5, lanes=2, seed=1)
    lanes, _ = read(stream, [1])
    for first in (17, 3, 20, 0):
        assert rows_of(lanes.take(1, first, 5)) == lane_in_order(stream, 1, 30)[first : first + 5]


def test_lanes_that_stand_where_they_should_are_not_read_again(read):
    lanes, shards = read(ShardStream(40, 2, lanes=2), [0, 1])
    for lane in (0, 1):
        lanes.take(lane, 0, 7)
    before = len(shards.opened)
    lanes.start([7, 7])
    lanes.take(0, 7, 7)
    assert len(shards.opened) == before


def test_the_first_shards_of_all_lanes_are_asked_for_together(read):
    lanes, shards = read(ShardStream(40, 4, lanes=3), [0, 1, 2])
    lanes.start([0, 0, 0])
    assert [reader.hinted for reader in shards.opened] == [True, False] * 3


def test_the_next_shard_is_there_when_half_of_the_current_one_is_used(read):
    lanes, shards = read(ShardStream(40, 2, seed=4), [0])
    lanes.take(0, 0, 10)
    lanes.read_ahead()
    following = shards.opened[1]
    shards.wait_for(lambda: following.rows_read == 20)


def test_at_most_two_shards_of_a_lane_are_in_memory(read):
    lanes, shards = read(ShardStream(60, 6, seed=4), [0])
    for first in range(0, 100, 5):
        lanes.take(0, first, 5)
        lanes.read_ahead()
        following = shards.opened[-1]
        shards.wait_for(lambda following=following: following.rows_read == 10)
    assert shards.most_at_once == 2
    assert sum(not reader.closed for reader in shards.opened) == 2


@pytest.mark.parametrize("error", [DataError("row 3 is damaged"), ZeroDivisionError("a mistake")])
def test_what_goes_wrong_in_the_thread_is_raised_where_the_rows_are_wanted(read, error):
    stream = ShardStream(20, 2, seed=4)
    second = stream.turn(0, 1)
    lanes, _ = read(stream, [0], broken=(second.epoch, second.shard, error))
    lanes.take(0, 0, 10)
    with pytest.raises(type(error), match=str(error)):
        lanes.take(0, 10, 1)


def test_closing_ends_the_thread_and_closes_all_shards():
    shards = Shards()
    lanes = ShardLanes(ShardStream(40, 4, lanes=2), [0, 1], shards.open)
    lanes.take(0, 0, 5)
    lanes.close()
    assert all(reader.closed for reader in shards.opened)
    assert not [thread for thread in threading.enumerate() if thread.name == "shards"]


def test_closed_lanes_give_no_rows():
    lanes = ShardLanes(ShardStream(40, 4), [0], Shards().open)
    lanes.close()
    with pytest.raises(RuntimeError, match="after the lanes were closed"):
        lanes.take(0, 0, 1)
