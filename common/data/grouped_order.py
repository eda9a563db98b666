"""Order of samples in which each micro-batch has samples of one group only, such as landscape pictures.

A pass is a permutation of all samples. In it, the samples of each group are cut into micro-batches; the last one of a
group may be incomplete. The micro-batches of all groups are ordered by their first samples. Passes follow each other
without a gap, so a global batch may contain the end of one pass and the start of the next. With L micro-batches per
global batch over all replicas, global batch s has the micro-batches [s*L, (s+1)*L) of the stream, which the replicas
take in turn. So N replicas with one micro-batch each see the same data as one replica that accumulates N. Everything
is a pure function of (seed, pass, position).

Incomplete micro-batches count as complete ones: a block ends with the first global batch that would reach its last
sample if all were complete. So a pass is longer than its samples by up to one micro-batch per group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.data.batches import Block
from common.data.order import MicroBatches, permutation
from common.errors import ConfigError

_KEPT_PASSES = 2
"""Number of cached passes: a global batch may span two."""


class GroupedStream:
    """One replica's part of the training stream; a :class:`common.data.order.SampleStream`.

    Args:
        group_P: (P,) int64, the group of each sample.
        mine: the micro-batches of this replica.
        seed: seed of the permutations.
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
        epoch, place = divmod(self._mine.everywhere(number), self.pass_length)
        return [(epoch, sample) for sample in self.cut(epoch)[place].tolist()]

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
            places = np.flatnonzero(group_P == group)
            pieces += np.split(places, range(size, len(places), size))
        return [order_P[places] for places in sorted(pieces, key=lambda places: int(places[0]))]


class GroupedShard:
    """One replica's part of an evaluation set in which all samples of a batch have the same key.

    A :class:`common.data.order.SampleShard`. The samples of each key are cut into batches in order, and the batches
    are distributed to the replicas in turn. Replicas with one batch less get a batch of padding at the end.

    Args:
        keys: key of each sample.
        batch: samples per batch.
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
