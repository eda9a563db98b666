"""The order of training data that lie in shards, as a pure function of (seed, position).

The stream of shards is epoch after epoch, each a permutation of all shards, without a gap. A *lane* is one micro-batch
of every global batch, over all ranks: lane a * R + r is accumulation step a of replica r of R. Lane l of L reads the
shards l, l + L, l + 2L, ... of the stream, each wholly, and its micro-batches run across the ends of shards. N replicas
with one micro-batch each so see what one replica sees that accumulates N, and every shard of an epoch is read by one
lane, whatever their numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.data.order import sample_generator
from common.errors import ConfigError

# The purposes that a seed serves; numbers, since trailing zeros of a key would not tell keys of two lengths apart. 3 is
# that of the seeds of micro-batches.
_SHARDS, _ROWS = 1, 2


def shard_sizes(rows: int, shards: int, larger_first: bool) -> NDArray[np.int64]:
    """Rows of each shard: they differ by one at most; the larger ones are the first or the last."""
    place = np.arange(shards) if larger_first else np.arange(shards)[::-1]
    return rows // shards + (place < rows % shards).astype(np.int64)


@dataclass(frozen=True)
class Turn:
    """One reading of one shard.

    Attributes:
        epoch: pass over all shards, from 0.
        shard: number of the shard.
        rows: rows in it.
    """

    epoch: int
    shard: int
    rows: int


@dataclass(frozen=True)
class ShardStream:
    """The stream of shards and how lanes share it.

    Attributes:
        rows: rows of all shards together. They differ by at most one row; ``rows % shards`` have one more.
        shards: number of shards.
        lanes: micro-batches of one global batch over all ranks.
        seed: of the permutations.
        larger_first: whether the shards with one row more are the first, or else the last.
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
        """Rows of ``shard``."""
        place = shard if self.larger_first else self.shards - 1 - shard
        return self.rows // self.shards + (place < self.rows % self.shards)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """The order of all shards in ``epoch`` (from 0)."""
        return _permutation(self.shards, self.seed, epoch)

    def turn(self, lane: int, number: int) -> Turn:
        """What ``lane`` reads as its shard ``number`` (from 0)."""
        epoch, place = divmod(lane + number * self.lanes, self.shards)
        shard = int(self.permutation(epoch)[place])
        return Turn(epoch, shard, self.rows_of(shard))

    def find(self, lane: int, row: int) -> tuple[int, int]:
        """Where row ``row`` (from 0) of all rows that ``lane`` ever reads is: number of its turn, and row therein."""
        number = 0
        while row >= (rows := self.turn(lane, number).rows):
            row -= rows
            number += 1
        return number, row

    def row_generator(self, turn: Turn) -> np.random.Generator:
        """The generator of the order of rows within one reading of a shard."""
        return sample_generator(self.seed, _ROWS, turn.epoch, turn.shard)


@functools.lru_cache(maxsize=8)
def _permutation(shards: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = sample_generator(seed, _SHARDS, epoch).permutation(shards)
    order.flags.writeable = False
    return order
