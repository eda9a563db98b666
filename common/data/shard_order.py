"""The order of training data that are stored in shards, as a pure function of (seed, position).

The stream of shards consists of epochs, each a permutation of all shards, without gaps. A *lane* is a stream of
micro-batches, one per global batch: of R replicas, replica r uses lane a * R + r for its accumulation step a. Lane l
of L reads the shards l, l + L, l + 2L, ... of the stream, each completely; a micro-batch may contain rows of two
shards. So N replicas with one micro-batch each see the same data as one replica that accumulates N, and each shard of
an epoch is read by exactly one lane, for any number of shards and lanes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.data.order import sample_generator
from common.errors import ConfigError

# Second number of a generator's key: what the random numbers are for. Not 0, because keys that differ only in trailing
# zeros give the same numbers. `common.data.order` uses 3, for micro-batches.
_SHARDS, _ROWS = 1, 2


def shard_sizes(rows: int, shards: int, larger_first: bool) -> NDArray[np.int64]:
    """Return the number of rows of each shard. They differ by at most one; the larger shards come first or last."""
    place = np.arange(shards) if larger_first else np.arange(shards)[::-1]
    return rows // shards + (place < rows % shards).astype(np.int64)


@dataclass(frozen=True)
class Turn:
    """One reading of one shard.

    Attributes:
        epoch: epoch of the stream of shards, from 0.
        shard: number of the shard.
        rows: rows of the shard.
    """

    epoch: int
    shard: int
    rows: int


@dataclass(frozen=True)
class ShardStream:
    """The stream of shards, and its distribution to lanes.

    Attributes:
        rows: rows of all shards together. ``rows % shards`` shards have one row more than the others.
        shards: number of shards.
        lanes: micro-batches per global batch over all ranks.
        seed: seed of the permutations.
        larger_first: whether the shards with one row more are the first ones; otherwise they are the last ones.
    """

    rows: int
    shards: int
    lanes: int = 1
    seed: int = 0
    larger_first: bool = True

    def __post_init__(self) -> None:
        for name in ("shards", "lanes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a stream of shards needs at least 1")
        if self.rows < self.shards:
            raise ConfigError(f"{self.rows} rows do not fill {self.shards} shards: every shard has at least one row")

    def rows_of(self, shard: int) -> int:
        """Return the number of rows of ``shard``."""
        place = shard if self.larger_first else self.shards - 1 - shard
        return self.rows // self.shards + (place < self.rows % self.shards)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of all shards in ``epoch`` (from 0)."""
        return _permutation(self.shards, self.seed, epoch)

    def turn(self, lane: int, number: int) -> Turn:
        """Return the shard that ``lane`` reads as its shard ``number`` (from 0), with its epoch."""
        epoch, place = divmod(lane + number * self.lanes, self.shards)
        shard = int(self.permutation(epoch)[place])
        return Turn(epoch, shard, self.rows_of(shard))

    def find(self, lane: int, row: int) -> tuple[int, int]:
        """Return turn number and row in that turn for row ``row`` (from 0) of all rows that ``lane`` ever reads."""
        number = 0
        while row >= (rows := self.turn(lane, number).rows):
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
