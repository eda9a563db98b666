"""The order of training samples as a pure function of (seed, epoch, position), and the sharding of evaluation sets.

The training stream consists of epochs, each a permutation of all samples, without gaps: a global batch may contain
the end of one epoch and the start of the next. Global batch s of B samples has the samples [s*B, (s+1)*B) of the
stream, micro-batch by micro-batch, replica by replica. So N replicas with one micro-batch each see the same data as
one replica that accumulates N. A block ends with the first global batch that reaches its last sample.
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
"""Second number of a generator's key, for seeds of micro-batches; :mod:`common.data.shard_order` uses 1 and 2."""


class SampleStream(Protocol):
    """One replica's part of the training: the samples in each of its micro-batches.

    Attributes:
        train_samples: samples per epoch.
        micro_batch: samples per micro-batch of one replica.
        replicas: number of data-parallel replicas.
    """

    @property
    def train_samples(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    def first_micro_batch(self, block: Block) -> int:
        """Return the number of micro-batches of this replica before ``block``."""
        ...

    def micro_batches(self, block: Block) -> int:
        """Return the number of micro-batches of this replica in ``block``; equal on all replicas."""
        ...

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """Return the (epoch, sample) pairs of this replica's micro-batch ``number`` of the whole training, from 0."""
        ...

    def key(self, number: int) -> Hashable:
        """Return the :attr:`common.data.batches.Batch.key` of micro-batch ``number``."""
        ...


class SampleShard(Protocol):
    """One replica's part of an evaluation set.

    All replicas have the same number of batches, which may end with padding.

    Attributes:
        eval_samples: samples in the whole set.
        batch: samples per batch of one replica.
        batches: number of batches of one replica.
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
        """Return the real samples in ``batch`` (from 0)."""
        ...

    def valid(self, batch: int) -> int:
        """Return the number of real samples in ``batch``."""
        ...

    def key(self, batch: int) -> Hashable:
        """Return the :attr:`common.data.batches.HostBatch.key` of ``batch``."""
        ...


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one replica, counted over the whole training.

    Attributes:
        micro_batch: nominal samples per micro-batch of one replica.
        accumulation: micro-batches of a replica per global batch.
        replicas: number of data-parallel replicas.
        replica: this replica, from 0.
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
        """Micro-batches per global batch over all replicas."""
        return self.accumulation * self.replicas

    def lane(self, accumulation_step: int) -> int:
        """Return the position of this replica's ``accumulation_step`` (from 0) among a global batch's micro-batches."""
        return accumulation_step * self.replicas + self.replica

    def first(self, block: Block) -> int:
        """Return the number of micro-batches of this replica before ``block``."""
        return self._until(block.start_sample)

    def count(self, block: Block) -> int:
        """Return the number of micro-batches of this replica in ``block``: always whole global batches."""
        return self._until(block.start_sample + block.samples) - self.first(block)

    def place(self, number: int) -> tuple[int, int]:
        """Return global batch and accumulation step (both from 0) of this replica's micro-batch ``number``."""
        return divmod(number, self.accumulation)

    def everywhere(self, number: int) -> int:
        """Return the position of this replica's micro-batch ``number`` among the micro-batches of all replicas."""
        step, accumulation_step = self.place(number)
        return step * self.lanes + self.lane(accumulation_step)

    def random_seed(self, seed: int, number: int) -> int:
        """Return a seed in [0, 2**63) for this replica's micro-batch ``number``.

        It depends only on ``seed`` and on the position of the micro-batch in the whole training, not on the number of
        ranks that share the global batch.
        """
        return int(sample_generator(seed, _MICRO_BATCH, self.everywhere(number)).integers(2**63))

    def _until(self, samples: int) -> int:
        return -(-samples // (self.micro_batch * self.lanes)) * self.accumulation


@dataclass(frozen=True)
class EpochStream:
    """One replica's part of the training stream.

    Attributes:
        train_samples: samples per epoch.
        micro_batch: samples per micro-batch of one replica.
        accumulation: micro-batches of a replica per global batch.
        replicas: number of data-parallel replicas.
        replica: this replica, from 0.
        seed: seed of the permutations.
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
        _ = self._mine  # checks the other attributes

    @property
    def _mine(self) -> MicroBatches:
        return MicroBatches(self.micro_batch, self.accumulation, self.replicas, self.replica)

    @property
    def global_batch(self) -> int:
        """Samples per step, over all replicas and micro-batches."""
        return self.micro_batch * self._mine.lanes

    def first_micro_batch(self, block: Block) -> int:
        """Return the number of micro-batches of this replica before ``block``."""
        return self._mine.first(block)

    def micro_batches(self, block: Block) -> int:
        """Return the number of micro-batches of this replica in ``block``: equal on all replicas."""
        return self._mine.count(block)

    def samples(self, block: Block, position: int) -> list[tuple[int, int]]:
        """Return the (epoch from 0, sample) pairs of micro-batch ``position`` of ``block`` on this replica.

        Raises:
            IndexError: the block has no such micro-batch.
        """
        if not 0 <= position < self.micro_batches(block):
            raise IndexError(f"block {block.index} has {self.micro_batches(block)} micro-batches, no {position}")
        return self.samples_of(self.first_micro_batch(block) + position)

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """Return the (epoch, sample) pairs of this replica's micro-batch ``number`` of the whole training, from 0."""
        start = (number * self.replicas + self.replica) * self.micro_batch
        places = (divmod(start + i, self.train_samples) for i in range(self.micro_batch))
        return [(epoch, int(self.permutation(epoch)[place])) for epoch, place in places]

    def key(self, number: int) -> Hashable:
        """Return (): all micro-batches have the same shapes."""
        return ()

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of all samples in ``epoch`` (from 0)."""
        return permutation(self.train_samples, self.seed, epoch)


@functools.lru_cache(maxsize=3)
def permutation(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of ``samples`` samples in ``epoch`` (from 0), read-only; a pure function of its arguments."""
    order = sample_generator(seed, epoch).permutation(samples)
    order.flags.writeable = False
    return order


def sample_generator(*key: int) -> np.random.Generator:
    """Return a random generator that depends only on ``key``, e.g. (seed, epoch, sample)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([part & (2**63 - 1) for part in key])))


@dataclass(frozen=True)
class EvalShard:
    """One replica's contiguous part of an evaluation set. The parts are disjoint and together are the whole set.

    Every replica has the same number of batches; positions after its last sample are padding.
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
        """Number of batches per evaluation, equal on all replicas."""
        longest = -(-self.eval_samples // self.replicas)
        return -(-longest // self.batch)

    def samples(self, batch: int) -> range:
        """Return the real samples in ``batch`` (from 0)."""
        first = self.start + batch * self.batch
        return range(first, first + self.valid(batch))

    def valid(self, batch: int) -> int:
        """Return the number of real samples in ``batch`` (from 0); padding follows them."""
        return max(0, min(self.batch, self.end - self.start - batch * self.batch))

    def key(self, batch: int) -> Hashable:
        """Return (): all batches have the same shapes."""
        return ()
