"""Seeds of training and evaluation: the classified nodes, in order and in micro-batches.

A lane is one stream of micro-batches: one micro-batch of each global batch. Every lane has its own contiguous range
of floor(n / lanes) training seeds, and visits it in a new order in each epoch, like the ranks of the reference.
Remaining seeds are not trained on; the last micro-batch of an epoch may be short.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rgat.device_tables import to_device
from benchmarks.rgat.sampling import SeedBatch
from common.data.batches import Block
from common.data.order import EvalShard, MicroBatches, sample_generator
from common.errors import ConfigError

NO_LABEL = -1
"""Label of a padding seed."""

_ORDER, _EVALUATION, _MEASURING = 11, 12, 13
"""Purposes of random numbers."""


@dataclass(frozen=True)
class Labelled:
    """Nodes and their classes.

    Attributes:
        nodes: int32, (n,).
        labels: int16, (n,).
    """

    nodes: NDArray[np.int32]
    labels: NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.nodes)


class SeedStream:
    """Seeds of one replica's micro-batches.

    Args:
        labelled: all training seeds.
        mine: this replica's part of every global batch.
        seed: random seed of the orders.
        device: device of the batches.

    Raises:
        ConfigError: a lane has fewer seeds than a micro-batch.
    """

    def __init__(self, labelled: Labelled, mine: MicroBatches, seed: int, device: torch.device) -> None:
        self.labelled, self.mine, self.seed, self.device = labelled, mine, seed, device
        self._orders: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        if self.lane_seeds < self.mine.micro_batch:
            raise ConfigError(
                f"micro_batch={self.mine.micro_batch}: {len(self.labelled)} training seeds over {self.mine.lanes} "
                f"micro-batches of a global batch are only {self.lane_seeds} for each"
            )

    @property
    def lane_seeds(self) -> int:
        """Seeds per lane and epoch."""
        return len(self.labelled) // self.mine.lanes

    @property
    def steps_of_epoch(self) -> int:
        """Global batches per epoch."""
        return -(-self.lane_seeds // self.mine.micro_batch)

    def batches(self, block: Block, start: int = 0) -> Iterator[tuple[SeedBatch, Tensor]]:
        """Yield this replica's micro-batches of ``block`` from position ``start``: seeds, and labels [B], int64."""
        first = self.mine.first(block)
        for position in range(start, self.mine.count(block)):
            yield self.batch(first + position)

    def batch(self, number: int) -> tuple[SeedBatch, Tensor]:
        """Return this replica's micro-batch ``number``, counted from the start of training."""
        step, accumulation_step = self.mine.place(number)
        epoch, index = divmod(step, self.steps_of_epoch)
        nodes, labels = self._epoch(self.mine.lane(accumulation_step), epoch)
        begin = index * self.mine.micro_batch
        return padded(nodes, labels, begin, self.mine.micro_batch, self.mine.random_seed(self.seed, number))

    def measuring(self, batches: int) -> Iterator[SeedBatch]:
        """Yield batches for estimating capacities: those of the first lane's first epoch, with other random draws."""
        nodes, labels = self._epoch(self.mine.lane(0), 0)
        for index in range(batches):
            begin = index % (self.lane_seeds // self.mine.micro_batch) * self.mine.micro_batch
            drawn = int(sample_generator(self.seed, _MEASURING, self.mine.lane(0), index).integers(2**63))
            yield padded(nodes, labels, begin, self.mine.micro_batch, drawn)[0]

    def _epoch(self, lane: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Return seeds and labels of a lane in the order of an epoch, on the device."""
        if (lane, epoch) not in self._orders:
            for other in [key for key in self._orders if key[1] != epoch]:
                for tensor in self._orders.pop(other):
                    if tensor.is_cuda:  # created on another stream, and perhaps still to be read by this one
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self._orders[lane, epoch] = self._drawn(lane, epoch)
        return self._orders[lane, epoch]

    def _drawn(self, lane: int, epoch: int) -> tuple[Tensor, Tensor]:
        order = sample_generator(self.seed, _ORDER, epoch, lane).permutation(self.lane_seeds)
        part = slice(lane * self.lane_seeds, (lane + 1) * self.lane_seeds)
        arrays = (np.asarray(each[part])[order] for each in (self.labelled.nodes, self.labelled.labels))
        nodes, labels = (to_device(torch.from_numpy(array), self.device) for array in arrays)
        return nodes, labels


@dataclass(frozen=True)
class EvaluationSeeds:
    """Evaluation seeds of one rank, in batches of one size: the lanes rank, rank + ranks, and so on.

    The random draws depend only on lane and batch, so the result is the same for every number of ranks.

    Attributes:
        labelled: all evaluation seeds.
        batch: seeds per batch.
        lanes: number of contiguous parts of the seeds; a multiple of ``ranks``.
        ranks, rank: number of ranks that share the lanes, and index of this rank.
        seed: random seed; the same in every evaluation.
        device: device of the batches.
    """

    labelled: Labelled
    batch: int
    lanes: int
    ranks: int
    rank: int
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.lanes % self.ranks:
            raise ConfigError(
                f"evaluation ranks: {self.ranks} do not divide the {self.lanes} parts in which seeds are evaluated, "
                "the micro-batches of a global batch"
            )

    def batches(self) -> Iterator[tuple[SeedBatch, Tensor]]:
        """Yield seeds and labels [B], int64, of each batch. Every rank has the same number of batches."""
        nodes, labels = self._all
        for lane in range(self.rank, self.lanes, self.ranks):
            shard = EvalShard(len(self.labelled), self.batch, self.lanes, lane)
            for index in range(shard.batches):
                drawn = int(sample_generator(self.seed, _EVALUATION, lane, index).integers(2**63))
                begin = shard.start + index * self.batch
                yield padded(nodes, labels, begin, self.batch, drawn, shard.valid(index))

    def measuring(self, batches: int) -> Iterator[SeedBatch]:
        """Yield batches for estimating capacities."""
        nodes, labels = self._all
        for index in range(batches):
            begin = (self.rank * batches + index) * self.batch % max(1, len(nodes) - self.batch + 1)
            drawn = int(sample_generator(self.seed, _MEASURING, self.rank, index, 1).integers(2**63))
            yield padded(nodes, labels, begin, self.batch, drawn)[0]

    @functools.cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        """All seeds and labels on the device: 5 MB for the real set."""
        arrays = (np.array(each) for each in (self.labelled.nodes, self.labelled.labels))
        nodes, labels = (to_device(torch.from_numpy(array), self.device) for array in arrays)
        return nodes, labels


def padded(
    nodes: Tensor, labels: Tensor, begin: int, size: int, drawn: int, count: int | None = None
) -> tuple[SeedBatch, Tensor]:
    """Return seeds and labels from index ``begin``, padded to ``size``.

    Args:
        nodes, labels: int32 and int16, on the device.
        size: size of the batch.
        drawn: random seed for sampling and dropout.
        count: number of real seeds; None: as many as there are, up to ``size``.
    """
    count = min(size, len(nodes) - begin) if count is None else count
    seeds = nodes[begin : begin + count]
    label = labels[begin : begin + count].to(torch.int64)
    if count < size:
        seeds = torch.cat([seeds, seeds.new_zeros(size - count)])
        label = torch.cat([label, label.new_full((size - count,), NO_LABEL)])
    return SeedBatch(seeds, count, to_device(torch.tensor(drawn), nodes.device)), label
