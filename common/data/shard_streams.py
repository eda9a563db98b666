"""Training data that are stored in shards: their order, and a thread that reads them in advance.

The order is a pure function of (seed, position). Shards are ordered in epochs, each a permutation of all shards,
without gaps. A *stream* is a sequence of micro-batches, one per global batch: of R replicas, replica r uses stream
a * R + r for its accumulation step a. Stream l of L reads the shards l, l + L, l + 2L, ... of this order, each
completely; a micro-batch may contain rows of two shards. So N replicas with one micro-batch each see the same data as
one replica that accumulates N, and exactly one stream reads each shard of an epoch, for any numbers of both.

One thread reads the shards of this rank's streams in small pieces. When a fraction f of a stream's current shard is
used, the thread has read a fraction 2 f of the next one. So the next shard is complete at half of the current one,
reading is spread evenly over the steps, and the thread holds the GIL no longer than for one piece. Two shards per
stream are in memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.data.order import sample_generator
from common.errors import ConfigError

# Second number of a generator's key: what the random numbers are for. Not 0, because keys that differ only in trailing
# zeros give the same numbers. `common.data.order` uses 3, for micro-batches.
_SHARDS, _ROWS = 1, 2


def shard_sizes(rows: int, shards: int, larger_first: bool) -> NDArray[np.int64]:
    """Return the number of rows of each shard; they differ by at most one.

    Args:
        larger_first: whether the larger shards come first; otherwise they come last.
    """
    position = np.arange(shards) if larger_first else np.arange(shards)[::-1]
    return rows // shards + (position < rows % shards).astype(np.int64)


@dataclass(frozen=True)
class Turn:
    """One reading of one shard.

    Attributes:
        epoch: epoch of the order of shards, from 0.
    """

    epoch: int
    shard: int
    rows: int


@dataclass(frozen=True)
class ShardOrder:
    """The order of shards over all epochs, and their distribution to streams.

    Attributes:
        rows: rows of all shards together. ``rows % shards`` shards have one row more than the others.
        streams: micro-batches per global batch over all ranks.
        larger_first: whether the shards with one row more are the first ones; otherwise they are the last ones.
    """

    rows: int
    shards: int
    streams: int = 1
    seed: int = 0
    larger_first: bool = True

    def __post_init__(self) -> None:
        for name in ("shards", "streams"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a stream of shards needs at least 1")
        if self.rows < self.shards:
            raise ConfigError(f"{self.rows} rows do not fill {self.shards} shards: every shard has at least one row")

    def rows_of(self, shard: int) -> int:
        """Return the number of rows of ``shard``."""
        position = shard if self.larger_first else self.shards - 1 - shard
        return self.rows // self.shards + (position < self.rows % self.shards)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of all shards in ``epoch`` (from 0)."""
        return _permutation(self.shards, self.seed, epoch)

    def turn(self, stream: int, number: int) -> Turn:
        """Return the shard that ``stream`` reads as its shard ``number`` (from 0), with its epoch."""
        epoch, position = divmod(stream + number * self.streams, self.shards)
        shard = int(self.permutation(epoch)[position])
        return Turn(epoch, shard, self.rows_of(shard))

    def find(self, stream: int, row: int) -> tuple[int, int]:
        """Return turn number and row in that turn for row ``row`` (from 0) of all rows that ``stream`` ever reads."""
        number = 0
        while row >= (rows := self.turn(stream, number).rows):
            row -= rows
            number += 1
        return number, row

    def row_generator(self, turn: Turn) -> np.random.Generator:
        """Return the random generator for the order of rows in one reading of a shard."""
        return sample_generator(self.seed, _ROWS, turn.epoch, turn.shard)


@functools.lru_cache(maxsize=8)
def _permutation(shards: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = sample_generator(seed, _SHARDS, epoch).permutation(shards)
    order.flags.writeable = False
    return order


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
class ShardRows(Generic[Shard]):
    """Rows ``start`` to ``stop`` of a shard, in the order of their use."""

    shard: Shard
    start: int
    stop: int


@dataclass
class _Load(Generic[Shard]):
    """The reading of one turn, in progress or complete."""

    turn: Turn
    reader: ShardReader[Shard]
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.reader.shard is not None or self.error is not None


@dataclass
class _StreamState(Generic[Shard]):
    """Position in a stream: ``number`` of the current turn, ``used`` rows of this turn, and ``row`` of the stream."""

    number: int
    used: int
    row: int
    current: _Load[Shard]
    following: _Load[Shard]

    @property
    def behind(self) -> float:
        """Fraction of the next shard that should have been read by now but was not."""
        return 2 * self.used / self.current.turn.rows - self.following.reader.rows_read / self.following.turn.rows


class ShardStreams(Generic[Shard]):
    """The rows of some streams.

    Args:
        streams: indices of the streams that are read here.
        open_shard: returns the reader of a turn, without opening a file.
    """

    def __init__(
        self, order: ShardOrder, streams: Sequence[int], open_shard: Callable[[Turn], ShardReader[Shard]]
    ) -> None:
        self._order = order
        self._numbers = list(streams)
        self._open_shard = open_shard
        self._streams: dict[int, _StreamState[Shard]] = {}
        self._left: list[_Load[Shard]] = []
        self._wanted: _Load[Shard] | None = None
        self._undisturbed = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read_ahead, name="shards", daemon=True)
        self._thread.start()

    def start(self, rows: Sequence[int]) -> None:
        """Start to read all streams, stream i from row ``rows[i]`` of all rows that it ever reads.

        :meth:`take` can start a stream, too. With this method, the operating system fetches the first shards of all
        streams in parallel.
        """
        with self._changed:
            moved = [
                self._seek(stream, row)
                for stream, row in zip(self._numbers, rows, strict=True)
                if stream not in self._streams or self._streams[stream].row != row
            ]
            for stream in moved:
                stream.current.reader.hint()
            self._changed.notify_all()

    def take(self, stream: int, first: int, count: int) -> list[ShardRows[Shard]]:
        """Return rows ``first`` to ``first + count`` of all rows that ``stream`` ever reads; waits until they are read.

        Fast if ``first`` continues the previous call for this stream. Raises the errors of the shard's reader.
        """
        with self._changed:
            # Until `read_ahead`, the thread reads only what `take` waits for: large numpy operations on the rows
            # release the GIL, and each time a thread that reads would then hold it for milliseconds.
            self._undisturbed = True
            state = self._streams.get(stream)
            if state is None or state.row != first:
                state = self._seek(stream, first)
            pieces = []
            while count:
                if state.used == state.current.turn.rows:
                    self._next_shard(stream, state)
                shard = self._wait(state.current)
                taken = min(count, state.current.turn.rows - state.used)
                pieces.append(ShardRows(shard, state.used, state.used + taken))
                state.used += taken
                state.row += taken
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
        for stream in self._streams.values():
            stream.current.reader.close()
            stream.following.reader.close()
        self._streams.clear()

    def _load(self, stream: int, number: int) -> _Load[Shard]:
        turn = self._order.turn(stream, number)
        return _Load(turn, self._open_shard(turn))

    def _seek(self, stream: int, row: int) -> _StreamState[Shard]:
        left = self._streams.pop(stream, None)
        if left is not None:
            self._left += [left.current, left.following]
        number, used = self._order.find(stream, row)
        state = _StreamState(number, used, row, self._load(stream, number), self._load(stream, number + 1))
        self._streams[stream] = state
        return state

    def _next_shard(self, stream: int, state: _StreamState[Shard]) -> None:
        self._left.append(state.current)
        state.number += 1
        state.current, state.used = state.following, 0
        state.following = self._load(stream, state.number + 1)

    def _wait(self, load: _Load[Shard]) -> Shard:
        if not load.done:
            self._wanted = load
            self._changed.notify_all()
            self._changed.wait_for(lambda: load.done or self._closed)
            self._wanted = None
        if self._closed:
            raise RuntimeError("rows were asked for after the streams were closed")
        if load.error is not None:
            raise load.error
        assert load.reader.shard is not None
        return load.reader.shard

    def _read_ahead(self) -> None:
        """Read and close shards until the streams are closed. Only this thread does so before :meth:`close`."""
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
            if number in self._streams and not self._streams[number].current.done:
                return self._streams[number].current
        behind = [stream for stream in self._streams.values() if not stream.following.done and stream.behind > 0]
        return max(behind, key=lambda stream: stream.behind).following if behind else None
