"""Order of training samples as a pure function of (seed, epoch, position), and the sharding of evaluation sets.

The training stream consists of epochs, each a permutation of all samples, without gaps: a global batch may contain
the end of one epoch and the start of the next. Global batch s of B samples has the samples [s*B, (s+1)*B) of the
stream, micro-batch by micro-batch, replica by replica. So N replicas with one micro-batch each see the same data as
one replica that accumulates N. A block ends with the first global batch that reaches its last sample.

In a :class:`GroupedStream`, each micro-batch has samples of one group only, such as landscape pictures. The samples of
each group of an epoch are cut into micro-batches, of which the last one may be incomplete, and the micro-batches of all
groups are ordered by their first samples. Incomplete micro-batches count as complete ones, so an epoch is longer than
its samples by up to one micro-batch per group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.data.batches import Block
from common.errors import ConfigError

_MICRO_BATCH = 3
"""Second number of a generator's key, for seeds of micro-batches; :mod:`common.data.shard_streams` uses 1 and 2."""


class SampleStream(Protocol):
    """One replica's part of the training: the samples in each of its micro-batches.

    Attributes:
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
    def streams(self) -> int:
        """Micro-batches per global batch over all replicas; each is in another stream of micro-batches."""
        return self.accumulation * self.replicas

    def stream(self, accumulation_step: int) -> int:
        """Return the index in a global batch, and so the stream, of this replica's ``accumulation_step`` (from 0)."""
        return accumulation_step * self.replicas + self.replica

    def first(self, block: Block) -> int:
        """Return the number of micro-batches of this replica before ``block``."""
        return self._until(block.start_sample)

    def count(self, block: Block) -> int:
        """Return the number of micro-batches of this replica in ``block``: always whole global batches."""
        return self._until(block.start_sample + block.samples) - self.first(block)

    def step_of(self, number: int) -> tuple[int, int]:
        """Return global batch and accumulation step (both from 0) of this replica's micro-batch ``number``."""
        return divmod(number, self.accumulation)

    def global_index(self, number: int) -> int:
        """Return the index of this replica's micro-batch among those of all: ``number * replicas + replica``."""
        step, accumulation_step = self.step_of(number)
        return step * self.streams + self.stream(accumulation_step)

    def random_seed(self, seed: int, number: int) -> int:
        """Return a seed in [0, 2**63) for this replica's micro-batch ``number``.

        It depends only on ``seed`` and on the position of the micro-batch in the whole training, not on the number of
        ranks that share the global batch.
        """
        return int(sample_generator(seed, _MICRO_BATCH, self.global_index(number)).integers(2**63))

    def _until(self, samples: int) -> int:
        return -(-samples // (self.micro_batch * self.streams)) * self.accumulation


@dataclass(frozen=True)
class ReplicaStream:
    """Base of streams in which every micro-batch has the same shape.

    Attributes:
        mine: the micro-batches of this replica.
        train_samples: samples of the whole set.
    """

    mine: MicroBatches
    train_samples: int

    @property
    def micro_batch(self) -> int:
        """Samples per micro-batch of one replica."""
        return self.mine.micro_batch

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas."""
        return self.mine.replicas

    def first_micro_batch(self, block: Block) -> int:
        """Return the number of micro-batches of this replica before ``block``."""
        return self.mine.first(block)

    def micro_batches(self, block: Block) -> int:
        """Return the number of micro-batches of this replica in ``block``."""
        return self.mine.count(block)

    def key(self, number: int) -> Hashable:
        """Return (): all micro-batches have the same shape."""
        return ()


@dataclass(frozen=True)
class EpochStream:
    """One replica's part of the training stream.

    Attributes:
        train_samples: samples per epoch.
        micro_batch: samples per micro-batch of one replica.
        accumulation: micro-batches of a replica per global batch.
        replicas: number of data-parallel replicas.
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
        return self.micro_batch * self._mine.streams

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
        pairs: list[tuple[int, int]] = []
        while left := self.micro_batch - len(pairs):
            epoch, position = divmod(start + len(pairs), self.train_samples)
            pairs += [(epoch, sample) for sample in self.permutation(epoch)[position : position + left].tolist()]
        return pairs

    def random_seed(self, number: int) -> int:
        """Return a seed in [0, 2**63) for micro-batch ``number``, which does not depend on the number of ranks."""
        return self._mine.random_seed(self.seed, number)

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

    Attributes:
        eval_samples: samples in the whole set.
        replicas: replicas that share the set, or a node's shard of it.
        nodes: number of shards, of which ``node`` has the samples ``node``, ``node + nodes``, ... of the permuted set.
            The samples of this object are positions in the shard.
    """

    eval_samples: int
    batch: int
    replicas: int = 1
    replica: int = 0
    nodes: int = 1
    node: int = 0

    def __post_init__(self) -> None:
        for name in ("eval_samples", "batch", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: an evaluation needs at least 1")
        if not 0 <= self.replica < self.replicas:
            raise ConfigError(f"replica {self.replica} lies outside of {self.replicas} replicas")

    @property
    def _largest(self) -> int:
        """Samples of the node with the largest shard; other nodes have the same number or one less."""
        return -(-self.eval_samples // self.nodes)

    @property
    def start(self) -> int:
        """First sample of this replica."""
        return self._largest * self.replica // self.replicas

    @property
    def end(self) -> int:
        """One past the last sample of this replica."""
        own = len(range(self.node, self.eval_samples, self.nodes))
        return min(self._largest * (self.replica + 1) // self.replicas, own)

    @property
    def batches(self) -> int:
        """Number of batches per evaluation, equal on all replicas of all nodes."""
        longest = -(-self._largest // self.replicas)
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


_KEPT_PASSES = 2
"""Number of cached passes: a global batch may span two."""


class GroupedStream:
    """One replica's part of the training stream; a :class:`common.data.order.SampleStream`.

    Args:
        group_P: (P,) int64, the group of each sample.
        key_of: returns the batch key for the samples of a micro-batch.
    """

    def __init__(
        self,
        group_P: NDArray[np.int64],
        mine: MicroBatches,
        seed: int,
        key_of: Callable[[Sequence[int]], Hashable] = lambda samples: (),
    ) -> None:
        if not len(group_P):
            raise ConfigError("train_samples=0: a stream of samples needs at least 1")
        self._group_P, self._mine, self._key_of = group_P, mine, key_of
        self.train_samples, self.micro_batch, self.replicas, self.seed = (
            len(group_P), mine.micro_batch, mine.replicas, seed,
        )  # fmt: skip
        counts = np.unique(group_P, return_counts=True)[1]
        self.pass_length = int(np.sum(-(-counts // mine.micro_batch)))
        """Micro-batches per pass, over all replicas."""
        self._passes: dict[int, list[NDArray[np.int64]]] = {}

    def first_micro_batch(self, block: Block) -> int:
        """Return the number of micro-batches of this replica before ``block``."""
        return self._mine.first(block)

    def micro_batches(self, block: Block) -> int:
        """Return the number of micro-batches of this replica in ``block``: equal on all replicas."""
        return self._mine.count(block)

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """Return the (pass from 0, sample) pairs of this replica's micro-batch ``number``.

        At the end of a group there are fewer than elsewhere, but at least 1.
        """
        epoch, position = divmod(self._mine.global_index(number), self.pass_length)
        return [(epoch, sample) for sample in self.cut(epoch)[position].tolist()]

    def key(self, number: int) -> Hashable:
        """Return the batch key of micro-batch ``number``."""
        return self._key_of([sample for _, sample in self.samples_of(number)])

    def random_seed(self, number: int) -> int:
        """Return a seed in [0, 2**63) for micro-batch ``number``, which does not depend on the number of ranks."""
        return self._mine.random_seed(self.seed, number)

    def cut(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return the samples of each micro-batch of pass ``epoch`` (from 0), over all replicas."""
        if epoch not in self._passes:
            while len(self._passes) >= _KEPT_PASSES:
                self._passes.pop(next(iter(self._passes)), None)
            self._passes[epoch] = self._cut(epoch)
        return self._passes[epoch]

    def _cut(self, epoch: int) -> list[NDArray[np.int64]]:
        order_P = permutation(self.train_samples, self.seed, epoch)
        group_P, size = self._group_P[order_P], self.micro_batch
        pieces: list[NDArray[np.int64]] = []
        for group in np.unique(group_P):
            positions = np.flatnonzero(group_P == group)
            pieces += np.split(positions, range(size, len(positions), size))
        return [order_P[positions] for positions in sorted(pieces, key=lambda positions: int(positions[0]))]


class GroupedShard:
    """One replica's part of an evaluation set in which all samples of a batch have the same key.

    A :class:`common.data.order.SampleShard`. The samples of each key are cut into batches in order, and the batches
    are distributed to the replicas in turn. Replicas with one batch less end with padding, with the first batch's key.

    Args:
        replicas: number of replicas that share the set.
        replica: this replica, from 0.
    """

    def __init__(self, keys: Sequence[Hashable], batch: int, replicas: int = 1, replica: int = 0) -> None:
        for name, value in (("eval_samples", len(keys)), ("batch", batch), ("replicas", replicas)):
            if value < 1:
                raise ConfigError(f"{name}={value}: an evaluation needs at least 1")
        if not 0 <= replica < replicas:
            raise ConfigError(f"replica {replica} lies outside of {replicas} replicas")
        self.eval_samples, self.batch, self.replicas = len(keys), batch, replicas
        members: dict[Hashable, list[int]] = {}
        for sample, key in enumerate(keys):
            members.setdefault(key, []).append(sample)
        cut = [
            (key, samples[first : first + batch])
            for key, samples in members.items()
            for first in range(0, len(samples), batch)
        ]
        self.batches = -(-len(cut) // replicas)
        mine = cut[replica::replicas]
        self._mine = mine + [(cut[0][0], [])] * (self.batches - len(mine))

    def samples(self, batch: int) -> Sequence[int]:
        """Return the real samples in ``batch`` (from 0)."""
        return self._mine[batch][1]

    def valid(self, batch: int) -> int:
        """Return the number of real samples in ``batch`` (from 0); padding follows them."""
        return len(self._mine[batch][1])

    def key(self, batch: int) -> Hashable:
        """Return the key of all samples in ``batch`` (from 0)."""
        return self._mine[batch][0]
