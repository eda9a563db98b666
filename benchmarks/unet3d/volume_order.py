"""The order of volumes: which volume is which sample, as a pure function of (seed, global batch, shares, step).

Training consists of steps, counted from 0, of ``global_batch`` samples each. An epoch has the fewest steps that cover
all volumes: 168 volumes in batches of 80 are three steps, 240 samples (rules: the last batch of an epoch is padded).
Volumes are divided into ``shares`` equal shares, once for the whole training. Every share fills its part of each
global batch with a permutation of its volumes, which is drawn again for each epoch. If an epoch has more samples than
volumes, the permutation restarts.

With one share per replica, a replica needs to cache only its own volumes. The number of ranks has no influence: the
samples of each global batch are those that a single rank would see.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.data.batches import Block
from common.data.order import MicroBatches, sample_generator
from common.errors import ConfigError

_SHARES, _PERMUTATION, _SAMPLE = 11, 12, 13
"""Identify the random streams of a seed; :mod:`common.data.order` uses other numbers."""


@dataclass(frozen=True)
class VolumeOrder:
    """The volumes of all steps.

    The samples of a step have slots 0 ... ``global_batch`` - 1; the first ``global_batch / shares`` belong to share 0.

    Attributes:
        volumes: number of training volumes, which are numbered from 0.
        global_batch: samples per step over all ranks.
        shares: equal parts of the training set that never mix; 1 for a permutation of the whole set.

    Raises:
        ConfigError: ``shares`` does not divide the numbers of volumes and samples.
    """

    volumes: int
    global_batch: int
    shares: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for whole, what in ((self.volumes, "training volumes"), (self.global_batch, "samples of a global batch")):
            if whole % self.shares:
                raise ConfigError(
                    f"reader.shares={self.shares} does not divide the {whole} {what}; choose a common divisor, 0 for "
                    "an automatic choice, or 1 for one share of all volumes"
                )

    @property
    def steps_of_epoch(self) -> int:
        """Return the steps of an epoch, in which every volume appears."""
        return -(-self.volumes // self.global_batch)

    @property
    def samples_of_epoch(self) -> int:
        """Return the samples of an epoch, including the padding of the last batch."""
        return self.steps_of_epoch * self.global_batch

    def volume(self, step: int, slot: int) -> int:
        """Return the index of the volume that sample ``slot`` of global batch ``step`` shows (both from 0)."""
        epoch, step_of_epoch = divmod(step, self.steps_of_epoch)
        per_share = self.global_batch // self.shares
        share, slot_of_share = divmod(slot, per_share)
        order = _permutation(self.volumes, self.shares, self.seed, share, epoch)
        return int(order[(step_of_epoch * per_share + slot_of_share) % len(order)])

    def volumes_of_share(self, share: int) -> NDArray[np.int64]:
        """Return the volumes of ``share``, ascending."""
        return _volumes_of_share(self.volumes, self.shares, self.seed, share)

    def generator(self, step: int, slot: int) -> np.random.Generator:
        """Return the random generator of sample ``slot`` of global batch ``step``.

        It depends only on the seed and the sample's number in the training.
        """
        return sample_generator(self.seed, _SAMPLE, step * self.global_batch + slot)


@dataclass(frozen=True)
class ReplicaOrder:
    """The samples of one replica: adjacent slots of each step, divided into micro-batches.

    Attributes:
        mine: micro-batches of this replica; those of all replicas fill the global batch of ``order``.
    """

    order: VolumeOrder
    mine: MicroBatches

    @property
    def volumes(self) -> list[int]:
        """Return all volumes that this replica can need, ascending: those of the shares of its slots."""
        per_share = self.order.global_batch // self.order.shares
        slots = self.mine.accumulation * self.mine.micro_batch
        first = self.mine.replica * slots
        shares = range(first // per_share, (first + slots - 1) // per_share + 1)
        return sorted(int(volume) for share in shares for volume in self.order.volumes_of_share(share))

    def micro_batches(self, block: Block) -> tuple[int, int]:
        """Return this replica's micro-batches of ``block``: index of the first in the whole training, and their number.

        Raises:
            ConfigError: the epochs of ``block`` are not padded to whole steps, as the rules require.
        """
        size = self.order.samples_of_epoch
        if block.epochs and (block.start_sample, block.samples) != (
            (block.first_epoch - 1) * size,
            block.epochs * size,
        ):
            raise ConfigError(
                f"benchmark.schedule: {block.samples} samples in {block.epochs} epochs after {block.start_sample} "
                f"samples, but an epoch of {self.order.volumes} volumes in batches of {self.order.global_batch} has "
                f"{size}, because its last batch is padded"
            )
        return self.mine.first(block), self.mine.count(block)

    def samples(self, number: int) -> list[tuple[int, int]]:
        """Return step and slot of every sample of this replica's micro-batch ``number`` of the whole training."""
        step, accumulation_step = self.mine.step_of(number)
        size = self.mine.micro_batch
        first = (self.mine.replica * self.mine.accumulation + accumulation_step) * size
        return [(step, slot) for slot in range(first, first + size)]

    def first_use(self, number: int) -> list[int]:
        """Return all of :attr:`volumes`, in the order of their first use from micro-batch ``number`` on.

        Volumes that are not used in the next two epochs come last: if several replicas share a share, the others may
        use a volume for a long time.
        """
        micro_batches = 2 * self.order.steps_of_epoch * self.mine.accumulation
        samples = (sample for n in range(number, number + micro_batches) for sample in self.samples(n))
        return list(dict.fromkeys([*(self.order.volume(*sample) for sample in samples), *self.volumes]))


def shares_for(requested: int, volumes: int, replicas: int) -> int:
    """Return the number of shares of the volumes.

    Args:
        requested: configured number; 0 for one per replica if their number divides the volumes, otherwise 1.
    """
    if requested:
        return requested
    return replicas if volumes % replicas == 0 else 1


@functools.lru_cache(maxsize=512)
def _volumes_of_share(volumes: int, shares: int, seed: int, share: int) -> NDArray[np.int64]:
    size = volumes // shares
    assigned = sample_generator(seed, _SHARES).permutation(volumes)[share * size : (share + 1) * size]
    assigned.sort()
    assigned.flags.writeable = False
    return assigned


@functools.lru_cache(maxsize=512)
def _permutation(volumes: int, shares: int, seed: int, share: int, epoch: int) -> NDArray[np.int64]:
    own = _volumes_of_share(volumes, shares, seed, share)
    order = sample_generator(seed, _PERMUTATION, share, epoch).permutation(own)
    order.flags.writeable = False
    return order
