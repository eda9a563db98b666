"""The order of samples whose micro-batches are of one group each, such as pictures that are wider than high.

A pass is a permutation of all samples. In it, the samples of each group are cut into micro-batches, of which a group's
last one may be incomplete, and the micro-batches of all groups stand in the order of their first samples. Pass follows
pass without a gap, so that the end of one shares a global batch with the start of the next. Global batch s takes the
micro-batches [s*L, (s+1)*L) of the stream, L being the lanes: as many for each replica, one after another. So N
replicas with one micro-batch each see what one replica sees that accumulates N. Everything is a pure function of
(seed, pass, position).

Incomplete micro-batches count as whole ones: a block ends with the first global batch that would reach its last sample
if all were, and a pass is up to one micro-batch a group longer than its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.data.batches import Block
from common.data.order import MicroBatches, permutation
from common.errors import ConfigError

_KEPT_PASSES = 2
"""The ends of a global batch may lie in two of them."""


class GroupedStream:
    """One replica's part of the training stream; a :class:`common.data.order.SampleStream`.

    Args:
        group_P: (P,) int64, the group of each sample.
        mine: the micro-batches of this replica.
        seed: of the permutations.
        key_of: what the batch of some samples is told apart by.
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
        """Micro-batches of a pass."""
        self._passes: dict[int, list[NDArray[np.int64]]] = {}

    def first_micro_batch(self, block: Block) -> int:
        """Micro-batches that this replica was given before ``block``."""
        return self._mine.first(block)

    def micro_batches(self, block: Block) -> int:
        """Micro-batches of this replica in ``block``: a multiple of its accumulation, equal on all replicas."""
        return self._mine.count(block)

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """The (pass from 0, sample) pairs of this replica's micro-batch ``number``; at least 1, and fewer than others
        at the end of a group."""
        epoch, place = divmod(self._mine.everywhere(number), self.pass_length)
        return [(epoch, sample) for sample in self.cut(epoch)[place].tolist()]

    def key(self, number: int) -> Hashable:
        """What micro-batch ``number`` is told apart by."""
        return self._key_of([sample for _, sample in self.samples_of(number)])

    def random_seed(self, number: int) -> int:
        """A seed in [0, 2**63) for micro-batch ``number``, equal however many ranks share the global batch."""
        return self._mine.random_seed(self.seed, number)

    def cut(self, epoch: int) -> list[NDArray[np.int64]]:
        """The samples of each micro-batch of the pass ``epoch`` (from 0), of all replicas."""
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
    """One replica's part of an evaluation set whose batches are of one key each; a
    :class:`common.data.order.SampleShard`.

    The samples of each key are cut into batches in their order, and the batches dealt out to the replicas in turn:
    every sample is in one batch of one replica. Replicas that get one less have a batch of padding at the end.

    Args:
        keys: of each sample.
        batch: samples of a batch.
        replicas, replica: that share the set, and this one, from 0.
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
        """The real samples in ``batch`` (from 0)."""
        return self._mine[batch][1]

    def valid(self, batch: int) -> int:
        """Real samples in ``batch`` (from 0); the others are padding at its end."""
        return len(self._mine[batch][1])

    def key(self, batch: int) -> Hashable:
        """The key of all samples in ``batch`` (from 0)."""
        return self._mine[batch][0]
