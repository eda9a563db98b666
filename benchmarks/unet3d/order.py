"""Which volume is which sample: a pure function of (seed, global batch, shares, step).

Training consists of steps, counted from 0, of ``global_batch`` samples each. An epoch has as many steps as hold every
volume: 168 volumes in batches of 80 are three steps, 240 samples (rules: the last batch of an epoch is padded). The
volumes are dealt to ``shares`` equal shares, once for the whole training, and every share fills its part of every
global batch with a permutation of its own volumes that is drawn anew in each epoch. Where an epoch has more samples
than volumes, the permutation is used again from its start.

A share for each replica lets a replica cache its own volumes and no others. How many ranks there are, and how they
share a batch, does not enter: they all see the same samples, in the same global batches, that one rank would see.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.data.batches import Block
from common.data.order import MicroBatches, sample_generator
from common.errors import ConfigError

_DEAL, _PERMUTATION, _SAMPLE = 11, 12, 13
"""Purposes of the random numbers; :mod:`common.data.order` has others."""


@dataclass(frozen=True)
class VolumeOrder:
    """The volumes of all steps.

    A step's samples have slots 0 ... ``global_batch`` - 1; the first ``global_batch / shares`` are those of share 0.

    Attributes:
        volumes: volumes of the training set; they are numbered from 0.
        global_batch: samples of a step over all ranks.
        shares: equal parts of the set that never mix; 1 for a permutation of the whole set.
        seed: of the run.

    Raises:
        ConfigError: the shares do not divide the volumes and the batch.
    """

    volumes: int
    global_batch: int
    shares: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("volumes", "global_batch", "shares"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: an order of volumes needs at least 1")
        for whole, what in ((self.volumes, "training volumes"), (self.global_batch, "samples of a global batch")):
            if whole % self.shares:
                raise ConfigError(
                    f"reader.shares={self.shares} does not divide the {whole} {what}; take a common divisor, 0 to have "
                    "one chosen, or 1 for all volumes in one share"
                )

    @property
    def steps_of_epoch(self) -> int:
        """Steps in which every volume appears."""
        return -(-self.volumes // self.global_batch)

    @property
    def samples_of_epoch(self) -> int:
        """Samples of an epoch: the volumes, and what fills up the last batch."""
        return self.steps_of_epoch * self.global_batch

    def volume(self, step: int, slot: int) -> int:
        """The volume of a sample."""
        epoch, step_of_epoch = divmod(step, self.steps_of_epoch)
        per_share = self.global_batch // self.shares
        share, place = divmod(slot, per_share)
        order = _permutation(self.volumes, self.shares, self.seed, share, epoch)
        return int(order[(step_of_epoch * per_share + place) % len(order)])

    def volumes_of_share(self, share: int) -> NDArray[np.int64]:
        """The volumes that ``share`` was dealt, ascending."""
        return _deal(self.volumes, self.shares, self.seed, share)

    def generator(self, step: int, slot: int) -> np.random.Generator:
        """The generator of all that is drawn for a sample: it depends on the seed and the sample's number alone."""
        return sample_generator(self.seed, _SAMPLE, step * self.global_batch + slot)


@dataclass(frozen=True)
class ReplicaOrder:
    """One replica's part of every step: neighbouring slots, micro-batch by micro-batch.

    Attributes:
        order: of all samples.
        mine: the micro-batches of this replica; those of all replicas fill the order's global batch.
    """

    order: VolumeOrder
    mine: MicroBatches

    def __post_init__(self) -> None:
        if self.mine.micro_batch * self.mine.lanes != self.order.global_batch:
            raise ConfigError(
                f"{self.mine.lanes} micro-batches of {self.mine.micro_batch} samples make no global batch of "
                f"{self.order.global_batch}"
            )

    @property
    def volumes(self) -> list[int]:
        """The volumes that this replica may ever meet, ascending: those of the shares that its slots lie in."""
        per_share = self.order.global_batch // self.order.shares
        slots = self.mine.accumulation * self.mine.micro_batch
        first = self.mine.replica * slots
        shares = range(first // per_share, (first + slots - 1) // per_share + 1)
        return sorted(int(volume) for share in shares for volume in self.order.volumes_of_share(share))

    def micro_batches(self, block: Block) -> tuple[int, int]:
        """This replica's micro-batches of ``block``: the first, counted over the whole training, and how many.

        Raises:
            ConfigError: the block's epochs are not of whole steps, as the rules' are.
        """
        size = self.order.samples_of_epoch
        if block.epochs and (block.start_sample, block.samples) != (
            (block.first_epoch - 1) * size,
            block.epochs * size,
        ):
            raise ConfigError(
                f"benchmark.schedule: {block.samples} samples in {block.epochs} epochs after {block.start_sample} "
                f"samples, but an epoch of {self.order.volumes} volumes in batches of {self.order.global_batch} has "
                f"{size}, since its last batch is filled up"
            )
        return self.mine.first(block), self.mine.count(block)

    def samples(self, number: int) -> list[tuple[int, int]]:
        """Step and slot of every sample of this replica's micro-batch ``number``, counted over the whole training."""
        step, accumulation_step = self.mine.place(number)
        size = self.mine.micro_batch
        first = (self.mine.replica * self.mine.accumulation + accumulation_step) * size
        return [(step, slot) for slot in range(first, first + size)]

    def first_use(self, number: int) -> list[int]:
        """All of :attr:`volumes`, in the order in which they are met from micro-batch ``number`` on.

        Those that are not met in the next two epochs come last: where several replicas draw from one share, a volume
        may be the others' for a long time.
        """
        micro_batches = 2 * self.order.steps_of_epoch * self.mine.accumulation
        samples = (sample for n in range(number, number + micro_batches) for sample in self.samples(n))
        return list(dict.fromkeys([*(self.order.volume(*sample) for sample in samples), *self.volumes]))


def shares_for(requested: int, volumes: int, replicas: int) -> int:
    """``requested`` shares; 0 asks for one for each replica where that divides the volumes, else for one."""
    if requested:
        return requested
    return replicas if volumes % replicas == 0 else 1


@functools.lru_cache(maxsize=512)
def _deal(volumes: int, shares: int, seed: int, share: int) -> NDArray[np.int64]:
    size = volumes // shares
    dealt = sample_generator(seed, _DEAL).permutation(volumes)[share * size : (share + 1) * size]
    dealt.sort()
    dealt.flags.writeable = False
    return dealt


@functools.lru_cache(maxsize=512)
def _permutation(volumes: int, shares: int, seed: int, share: int, epoch: int) -> NDArray[np.int64]:
    order = sample_generator(seed, _PERMUTATION, share, epoch).permutation(_deal(volumes, shares, seed, share))
    order.flags.writeable = False
    return order
