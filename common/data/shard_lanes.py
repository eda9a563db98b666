"""Reads the shards of this rank's lanes ahead of their use, in one thread and in small pieces.

The thread reads as far into a lane's next shard as the lane has used of its current one, times two: a shard is whole
when half of the one before it is used, the work is spread evenly over the steps, and the thread keeps the interpreter
no longer than a piece takes. Two shards of a lane exist at a time.
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
    """One shard on its way into memory. Nothing is opened before the first :meth:`advance`."""

    rows_read: int

    @property
    def shard(self) -> Read | None:
        """The whole shard; None until its last piece is read."""
        ...

    def hint(self) -> None:
        """Let the operating system begin to fetch the file."""
        ...

    def advance(self) -> None:
        """Open the file or read a piece of it, a few milliseconds' work."""
        ...

    def close(self) -> None:
        """Close the file, and forget what was read."""
        ...


@dataclass(frozen=True)
class Piece(Generic[Shard]):
    """Rows ``start`` to ``stop`` of a shard, in the order of their use."""

    shard: Shard
    start: int
    stop: int


class _Load(Generic[Shard]):
    """A turn that is being read, or has been."""

    def __init__(self, turn: Turn, reader: ShardReader[Shard]) -> None:
        self.turn = turn
        self.reader = reader
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.reader.shard is not None or self.error is not None


class _Lane(Generic[Shard]):
    """Where a lane stands: ``number`` of its current turn, rows used of it, rows used of all turns."""

    def __init__(self, number: int, used: int, position: int, current: _Load[Shard], following: _Load[Shard]) -> None:
        self.number = number
        self.used = used
        self.position = position
        self.current = current
        self.following = following

    @property
    def behind(self) -> float:
        """Share of the following shard that should have been read by now and was not."""
        return 2 * self.used / self.current.turn.rows - self.following.reader.rows_read / self.following.turn.rows


class ShardLanes(Generic[Shard]):
    """The rows of some lanes of a stream of shards.

    Args:
        stream: shards and lanes.
        lanes: the lanes that are read here.
        open_shard: makes the reader of a turn; touches no file.
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
        """Begin to read all lanes, lane i from row ``rows[i]`` of all that it ever reads.

        :meth:`take` does so for one lane; together, the first shards of all lanes come from the disk side by side.
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
        """Rows ``first`` to ``first + count`` of all that ``lane`` ever reads; waits until they are there.

        Cheap where ``first`` continues the last call for this lane. Until :meth:`read_ahead` nothing else is read:
        every large numpy operation that makes a batch of the rows lets go of the interpreter, and a thread that reads
        would keep it for milliseconds each time. Raises what the reader of a shard raised.
        """
        with self._changed:
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
        """Go on reading until the next :meth:`take`: the batches of a step are made."""
        with self._changed:
            self._undisturbed = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and close all files."""
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
        """Do what is due, until the lanes are closed. Until then this thread alone reads and closes shards."""
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
        except BaseException as error:  # noqa: BLE001 - it is raised where the rows are wanted
            load.error = error

    def _due(self) -> _Load[Shard] | None:
        """What to read next: what is waited for, else what a lane stands in, else the following one most behind."""
        if self._wanted is not None and not self._wanted.done:
            return self._wanted
        if self._undisturbed:
            return None
        for number in self._numbers:
            if number in self._lanes and not self._lanes[number].current.done:
                return self._lanes[number].current
        behind = [lane for lane in self._lanes.values() if not lane.following.done and lane.behind > 0]
        return max(behind, key=lambda lane: lane.behind).following if behind else None
