"""The order of training samples as a pure function of (seed, epoch, position), and the shards of an evaluation.

The training stream is epoch after epoch, each a permutation of all samples, without a gap: the end of an epoch shares a
global batch with the start of the next. Global batch s takes the samples [s*B, (s+1)*B) of the stream, micro-batch by
micro-batch, replica by replica, so that N replicas with one micro-batch each see what one replica sees that
accumulates N micro-batches. A block ends with the first global batch that reaches its last sample.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.data.batches import Block
from common.errors import ConfigError

_MICRO_BATCH = 3
"""The purpose of a micro-batch's seed; :mod:`common.data.shard_order` has others."""


class SampleStream(Protocol):
    """One replica's part of the training: which samples are in which of its micro-batches.

    ``train_samples`` are those of an epoch, ``micro_batch`` those of a micro-batch of one replica, ``replicas`` the
    data-parallel ones.
    """

    @property
    def train_samples(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    def first_micro_batch(self, block: Block) -> int:
        """Micro-batches that this replica was given before ``block``."""
        ...

    def micro_batches(self, block: Block) -> int:
        """Micro-batches of this replica in ``block``: as many on all replicas."""
        ...

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """The (epoch from 0, sample) pairs of this replica's micro-batch ``number``, from 0 over the whole training."""
        ...

    def key(self, number: int) -> Hashable:
        """The :attr:`common.data.batches.Batch.key` of micro-batch ``number``."""
        ...


class SampleShard(Protocol):
    """One replica's part of an evaluation set, in batches: as many on every replica, some with padding at their end.

    ``eval_samples`` are those of the whole set, ``batch`` those of a batch of one replica, ``batches`` its number.
    """

    @property
    def eval_samples(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    @property
    def batches(self) -> int: ...

    def samples(self, batch: int) -> Sequence[int]:
        """The real samples in ``batch`` (from 0)."""
        ...

    def valid(self, batch: int) -> int:
        """How many those are."""
        ...

    def key(self, batch: int) -> Hashable:
        """The :attr:`common.data.batches.HostBatch.key` of ``batch``."""
        ...


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one replica, counted over the whole training.

    Attributes:
        micro_batch: nominal samples of one micro-batch of one replica.
        accumulation: micro-batches of a replica per global batch.
        replicas, replica: number of data-parallel replicas, and this one, from 0.
    """

    micro_batch: int
    accumulation: int = 1
    replicas: int = 1
    replica: int = 0

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a stream of micro-batches needs at least 1")
        if not 0 <= self.replica < self.replicas:
            raise ConfigError(f"replica {self.replica} lies outside of {self.replicas} replicas")

    @property
    def lanes(self) -> int:
        """Micro-batches of one global batch over all ranks."""
        return self.accumulation * self.replicas

    def lane(self, accumulation_step: int) -> int:
        """The lane of this replica's ``accumulation_step`` (from 0)."""
        return accumulation_step * self.replicas + self.replica

    def first(self, block: Block) -> int:
        """Micro-batches that this replica was given before ``block``."""
        return self._until(block.start_sample)

    def count(self, block: Block) -> int:
        """Micro-batches of this replica in ``block``: it ends with the first global batch that reaches its end."""
        return self._until(block.start_sample + block.samples) - self.first(block)

    def place(self, number: int) -> tuple[int, int]:
        """Global batch and accumulation step (both from 0) of this replica's micro-batch ``number``."""
        return divmod(number, self.accumulation)

    def everywhere(self, number: int) -> int:
        """The number, among the micro-batches of all replicas, of this one's micro-batch ``number``."""
        step, accumulation_step = self.place(number)
        return step * self.lanes + self.lane(accumulation_step)

    def random_seed(self, seed: int, number: int) -> int:
        """A seed in [0, 2**63) for this replica's micro-batch ``number``.

        It depends on ``seed`` and on the micro-batch's number in the whole training alone: equal however many ranks
        share the global batch.
        """
        return int(sample_generator(seed, _MICRO_BATCH, self.everywhere(number)).integers(2**63))

    def _until(self, samples: int) -> int:
        return -(-samples // (self.micro_batch * self.lanes)) * self.accumulation


@dataclass(frozen=True)
class EpochStream:
    """One replica's part of the training stream.

    Attributes:
        train_samples: samples of one epoch.
        micro_batch: samples of one micro-batch of one replica.
        accumulation: micro-batches of a replica per global batch.
        replicas: number of data-parallel replicas.
        replica: this one, from 0.
        seed: of the permutations.
    """

    train_samples: int
    micro_batch: int
    accumulation: int = 1
    replicas: int = 1
    replica: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train_samples < 1:
            raise ConfigError(f"train_samples={self.train_samples}: a stream of samples needs at least 1")
        _ = self._mine  # refuses impossible numbers

    @property
    def _mine(self) -> MicroBatches:
        return MicroBatches(self.micro_batch, self.accumulation, self.replicas, self.replica)

    @property
    def global_batch(self) -> int:
        """Samples of all replicas and micro-batches of one step."""
        return self.micro_batch * self._mine.lanes

    def first_micro_batch(self, block: Block) -> int:
        """Micro-batches that this replica was given before ``block``."""
        return self._mine.first(block)

    def micro_batches(self, block: Block) -> int:
        """Micro-batches of this replica in ``block``: a multiple of ``accumulation``, equal on all replicas."""
        return self._mine.count(block)

    def samples(self, block: Block, position: int) -> list[tuple[int, int]]:
        """The (epoch from 0, sample) pairs of micro-batch ``position`` of ``block`` on this replica.

        Raises:
            IndexError: the block has no such micro-batch.
        """
        if not 0 <= position < self.micro_batches(block):
            raise IndexError(f"block {block.index} has {self.micro_batches(block)} micro-batches, no {position}")
        return self.samples_of(self.first_micro_batch(block) + position)

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """The (epoch from 0, sample) pairs of this replica's micro-batch ``number``, from 0 over the whole training."""
        start = (number * self.replicas + self.replica) * self.micro_batch
        places = (divmod(start + i, self.train_samples) for i in range(self.micro_batch))
        return [(epoch, int(self.permutation(epoch)[place])) for epoch, place in places]

    def key(self, number: int) -> Hashable:
        """All are alike."""
        return ()

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """The order of all samples in ``epoch`` (from 0)."""
        return permutation(self.train_samples, self.seed, epoch)


@functools.lru_cache(maxsize=3)
def permutation(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of ``samples`` in ``epoch`` (from 0), read-only; a function of its arguments alone."""
    order = sample_generator(seed, epoch).permutation(samples)
    order.flags.writeable = False
    return order


def sample_generator(*key: int) -> np.random.Generator:
    """A generator that depends on ``key`` alone, e.g. (seed, epoch, sample)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([part & (2**63 - 1) for part in key])))


@dataclass(frozen=True)
class EvalShard:
    """One replica's part of an evaluation set: contiguous, disjoint, together the whole set.

    Every replica has the same number of batches; those beyond its samples are padding.
    """

    eval_samples: int
    batch: int
    replicas: int = 1
    replica: int = 0

    def __post_init__(self) -> None:
        for name in ("eval_samples", "batch", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: an evaluation needs at least 1")
        if not 0 <= self.replica < self.replicas:
            raise ConfigError(f"replica {self.replica} lies outside of {self.replicas} replicas")

    @property
    def start(self) -> int:
        """First sample of this replica."""
        return self.eval_samples * self.replica // self.replicas

    @property
    def end(self) -> int:
        """One past the last sample of this replica."""
        return self.eval_samples * (self.replica + 1) // self.replicas

    @property
    def batches(self) -> int:
        """Batches per evaluation, equal on all replicas."""
        longest = -(-self.eval_samples // self.replicas)
        return -(-longest // self.batch)

    def samples(self, batch: int) -> range:
        """The real samples in ``batch`` (from 0)."""
        first = self.start + batch * self.batch
        return range(first, first + self.valid(batch))

    def valid(self, batch: int) -> int:
        """Real samples in ``batch`` (from 0); the others are padding at its end."""
        return max(0, min(self.batch, self.end - self.start - batch * self.batch))

    def key(self, batch: int) -> Hashable:
        """All are alike."""
        return ()
