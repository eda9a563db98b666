"""Read the shards of this rank's lanes in advance, with one thread and in small pieces.

A lane is a stream of micro-batches (:mod:`common.data.shard_order`). When a fraction f of a lane's current shard is
used, the thread has read a fraction 2 f of the next one. So the next shard is complete at half of the current one,
reading is spread evenly over the steps, and the thread holds the GIL no longer than for one piece. Two shards per
lane are in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.data.shard_order import ShardStream, Turn

Shard = TypeVar("Shard")
Read = TypeVar("Read", covariant=True)


class ShardReader(Protocol[Read]):
    """Reader of one shard. It opens the file at the first :meth:`advance`."""

    rows_read: int

    @property
    def shard(self) -> Read | None:
        """The complete shard; None until its last piece is read."""
        ...

    def hint(self) -> None:
        """Ask the operating system to start fetching the file."""
        ...

    def advance(self) -> None:
        """Open the file, or read one piece of it, which takes a few milliseconds."""
        ...

    def close(self) -> None:
        """Close the file, and release the memory."""
        ...


@dataclass(frozen=True)
class Piece(Generic[Shard]):
    """Rows ``start`` to ``stop`` of a shard, in the order of their use."""

    shard: Shard
    start: int
    stop: int


class _Load(Generic[Shard]):
    """The reading of one turn, in progress or complete."""

    def __init__(self, turn: Turn, reader: ShardReader[Shard]) -> None:
        self.turn = turn
        self.reader = reader
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.reader.shard is not None or self.error is not None


class _Lane(Generic[Shard]):
    """Position in a lane: ``number`` of the current turn, ``used`` rows of this turn, and used rows of all turns."""

    def __init__(self, number: int, used: int, position: int, current: _Load[Shard], following: _Load[Shard]) -> None:
        self.number = number
        self.used = used
        self.position = position
        self.current = current
        self.following = following

    @property
    def behind(self) -> float:
        """Fraction of the next shard that should have been read by now but was not."""
        return 2 * self.used / self.current.turn.rows - self.following.reader.rows_read / self.following.turn.rows


class ShardLanes(Generic[Shard]):
    """The rows of some lanes of a stream of shards.

    Args:
        stream: shards and lanes.
        lanes: numbers of the lanes that are read here.
        open_shard: returns the reader of a turn, without opening a file.
    """

    def __init__(
        self, stream: ShardStream, lanes: Sequence[int], open_shard: Callable[[Turn], ShardReader[Shard]]
    ) -> None:
        self._stream = stream
        self._numbers = list(lanes)
        self._open_shard = open_shard
        self._lanes: dict[int, _Lane[Shard]] = {}
        self._left: list[_Load[Shard]] = []
        self._wanted: _Load[Shard] | None = None
        self._undisturbed = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read_ahead, name="shards", daemon=True)
        self._thread.start()

    def start(self, rows: Sequence[int]) -> None:
        """Start to read all lanes, lane i from row ``rows[i]`` of all rows that it ever reads.

        :meth:`take` can start a lane, too. This method lets the operating system fetch the first shards of all lanes
        in parallel.
        """
        with self._changed:
            moved = [
                self._seek(lane, row)
                for lane, row in zip(self._numbers, rows, strict=True)
                if lane not in self._lanes or self._lanes[lane].position != row
            ]
            for lane in moved:
                lane.current.reader.hint()
            self._changed.notify_all()

    def take(self, lane: int, first: int, count: int) -> list[Piece[Shard]]:
        """Return rows ``first`` to ``first + count`` of all rows that ``lane`` ever reads; waits until they are read.

        Fast if ``first`` continues the previous call for this lane. Raises the errors of the shard's reader.
        """
        with self._changed:
            # Until `read_ahead`, the thread reads only what `take` waits for: large numpy operations on the rows
            # release the GIL, and each time a thread that reads would then hold it for milliseconds.
            self._undisturbed = True
            place = self._lanes.get(lane)
            if place is None or place.position != first:
                place = self._seek(lane, first)
            pieces = []
            while count:
                if place.used == place.current.turn.rows:
                    self._next_shard(lane, place)
                shard = self._wait(place.current)
                taken = min(count, place.current.turn.rows - place.used)
                pieces.append(Piece(shard, place.used, place.used + taken))
                place.used += taken
                place.position += taken
                count -= taken
        return pieces

    def read_ahead(self) -> None:
        """Resume reading until the next :meth:`take`. Call it when the batches of a step are complete."""
        with self._changed:
            self._undisturbed = False
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and close all files."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for load in self._left:
            load.reader.close()
        for lane in self._lanes.values():
            lane.current.reader.close()
            lane.following.reader.close()
        self._lanes.clear()

    def _load(self, lane: int, number: int) -> _Load[Shard]:
        turn = self._stream.turn(lane, number)
        return _Load(turn, self._open_shard(turn))

    def _seek(self, lane: int, row: int) -> _Lane[Shard]:
        left = self._lanes.pop(lane, None)
        if left is not None:
            self._left += [left.current, left.following]
        number, used = self._stream.find(lane, row)
        place = _Lane(number, used, row, self._load(lane, number), self._load(lane, number + 1))
        self._lanes[lane] = place
        return place

    def _next_shard(self, lane: int, place: _Lane[Shard]) -> None:
        self._left.append(place.current)
        place.number += 1
        place.current, place.used = place.following, 0
        place.following = self._load(lane, place.number + 1)

    def _wait(self, load: _Load[Shard]) -> Shard:
        if not load.done:
            self._wanted = load
            self._changed.notify_all()
            self._changed.wait_for(lambda: load.done or self._closed)
            self._wanted = None
        if self._closed:
            raise RuntimeError("rows were asked for after the lanes were closed")
        if load.error is not None:
            raise load.error
        assert load.reader.shard is not None
        return load.reader.shard

    def _read_ahead(self) -> None:
        """Read and close shards until the lanes are closed. Only this thread does so before :meth:`close`."""
        while True:
            left: list[_Load[Shard]] = []
            due = None
            with self._changed:
                self._changed.notify_all()
                while not (self._closed or left or due):
                    if not self._undisturbed:
                        left, self._left = self._left, []
                    due = self._due()
                    if not (left or due):
                        self._changed.wait()
                if self._closed:
                    self._left += left
                    return
            for load in left:
                load.reader.close()
            if due is not None:
                self._advance(due)

    @staticmethod
    def _advance(load: _Load[Shard]) -> None:
        try:
            load.reader.advance()
        except BaseException as error:  # noqa: BLE001 - raised again in `take`
            load.error = error

    def _due(self) -> _Load[Shard] | None:
        """Return the load to read next: one that :meth:`take` waits for, a current one, or the next one most behind."""
        if self._wanted is not None and not self._wanted.done:
            return self._wanted
        if self._undisturbed:
            return None
        for number in self._numbers:
            if number in self._lanes and not self._lanes[number].current.done:
                return self._lanes[number].current
        behind = [lane for lane in self._lanes.values() if not lane.following.done and lane.behind > 0]
        return max(behind, key=lambda lane: lane.behind).following if behind else None
