"""Training and evaluation data of CosmoFlow: batches of raw particle counts (:mod:`benchmarks.cosmoflow.samples`).

A batch has ``x``, int16 (B, D, H, W, C), and ``y``, float32 (B, P). Batches of the evaluation also have ``weight``,
float32 (B,): 1 for a sample, 0 for padding. The device computes log(1 + x).

Axes: B samples; D, H, W voxels; C redshifts; P parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.cosmoflow.samples import PARAMETERS, REDSHIFTS, SPLITS, Split, read_manifest
from common.config.ranges import AtLeast
from common.data.batches import Block, DataSource, EvalSource
from common.data.direct_reader import Mode
from common.data.order import EpochStream, EvalShard, sample_generator
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.errors import ConfigError

_SHARD = 21
"""Identifies the random streams of the shards; :mod:`common.data.order` uses other numbers."""


@dataclass(frozen=True, kw_only=True)
class CubeReaderConfig:
    """Options of the reader.

    Attributes:
        threads: threads that read files.
        prefetch: batches that are read ahead.
        reads: ``direct`` reads past the page cache (O_DIRECT), for data larger than the memory; ``buffered`` reads
            through it; ``auto`` is ``direct`` where the file system supports it.
        checksums: compute the CRC-32C of every TFRecord, 50 ms per cube of 128^3 voxels. Without it, only ``verify``
            and ``prepare`` do.
        shards: equal parts of the training set that never mix, each for the same number of neighbouring replicas. With
            one shard per node, a node needs only its own shard on its disk.
        eval_batch: cubes of one evaluation batch on one rank.
    """

    threads: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1, "at least 1 batch")]
    reads: Mode
    checksums: bool
    shards: Annotated[int, AtLeast(1)]
    eval_batch: Annotated[int, AtLeast(1, "at least 1 cube")]


def shard_samples(samples: int, shards: int, shard: int, seed: int) -> NDArray[np.int64]:
    """Return the training samples of a shard: a random part of the whole set, the same for the whole run.

    Raises:
        ConfigError: ``shards`` does not divide the samples.
    """
    if samples % shards:
        raise ConfigError(f"reader.shards={shards} does not divide the {samples} training samples; choose a divisor")
    part = samples // shards
    return sample_generator(seed, _SHARD, shards).permutation(samples)[shard * part : (shard + 1) * part]


@dataclass(frozen=True)
class ShardedStream:
    """One replica's part of a training in which each replica sees only one shard; a ``SampleStream``.

    Within a shard, the order is that of an :class:`common.data.order.EpochStream` of the shard's replicas.

    Attributes:
        whole: the stream without shards; it determines the number of micro-batches in a block.

    Raises:
        ConfigError: ``shards`` does not divide the samples or the replicas.
    """

    whole: EpochStream
    shards: int

    def __post_init__(self) -> None:
        if self.whole.replicas % self.shards:
            raise ConfigError(
                f"reader.shards={self.shards} does not divide the {self.whole.replicas} data-parallel ranks (layout.dp)"
            )
        _ = self._samples

    @property
    def train_samples(self) -> int:
        """Samples per epoch, over all shards."""
        return self.whole.train_samples

    @property
    def micro_batch(self) -> int:
        """Samples per micro-batch of one replica."""
        return self.whole.micro_batch

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas, over all shards."""
        return self.whole.replicas

    def first_micro_batch(self, block: Block) -> int:
        """Return the number of micro-batches of this replica before ``block``."""
        return self.whole.first_micro_batch(block)

    def micro_batches(self, block: Block) -> int:
        """Return the number of micro-batches of this replica in ``block``."""
        return self.whole.micro_batches(block)

    def samples_of(self, number: int) -> list[tuple[int, int]]:
        """Return the (epoch, sample) pairs of this replica's micro-batch ``number`` of the whole training, from 0."""
        return [(epoch, int(self._samples[position])) for epoch, position in self._own.samples_of(number)]

    def key(self, number: int) -> Hashable:
        """Return (): all micro-batches have the same shapes."""
        return ()

    @cached_property
    def _shard(self) -> int:
        return self.whole.replica // (self.whole.replicas // self.shards)

    @cached_property
    def _samples(self) -> NDArray[np.int64]:
        return shard_samples(self.whole.train_samples, self.shards, self._shard, self.whole.seed)

    @cached_property
    def _own(self) -> EpochStream:
        """The stream of positions in the shard."""
        whole, replicas = self.whole, self.whole.replicas // self.shards
        seed = int(sample_generator(whole.seed, _SHARD, self.shards, self._shard).integers(2**63))
        return EpochStream(
            len(self._samples), whole.micro_batch, whole.accumulation, replicas, whole.replica % replicas, seed
        )


class _Batches:
    """Makes batches of a split in threads of this process."""

    def __init__(self, split: Split, reader: CubeReaderConfig, device: torch.device) -> None:
        self._split, self._pin_memory = split, device.type == "cuda"
        self.threads = SampleThreads(reader.threads, reader.prefetch)

    def begin(self, samples: Sequence[int], slots: int) -> PendingBatch:
        """Start to read ``samples`` into the first slots of a batch; ``x`` and ``y`` of the others are zero."""
        size = self._split.size
        x_BDHWC = self._empty((slots, size, size, size, REDSHIFTS), torch.int16)
        y_BP = self._empty((slots, PARAMETERS), torch.float32)
        for tensor in (x_BDHWC, y_BP):
            tensor[len(samples) :].zero_()

        def fill(slot: int) -> None:
            self._split.read(samples[slot], x_BDHWC[slot], y_BP[slot])

        return self.threads.begin({"x": x_BDHWC, "y": y_BP}, len(samples), fill)

    def begin_seeded(self, samples: Sequence[int], slots: int, seed: int) -> PendingBatch:
        """Start a batch as :meth:`begin` does, with the seed of a training step's dropout."""
        batch = self.begin(samples, slots)
        batch.tensors["seed"] = self._empty((), torch.int64).fill_(seed)
        return batch

    def begin_weighted(self, samples: Sequence[int], slots: int) -> PendingBatch:
        """Start a batch as :meth:`begin` does, with the weights of an evaluation."""
        batch = self.begin(samples, slots)
        weight_B = self._empty((slots,), torch.float32)
        weight_B[: len(samples)], weight_B[len(samples) :] = 1, 0
        batch.tensors["weight"] = weight_B
        return batch

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin_memory)


def open_train(
    root: Path, size: int, reader: CubeReaderConfig, layout: Layout, micro_batch: int, accumulation: int = 1
) -> DataSource:
    """Open the training data under ``root`` for this rank; call it after ``run_start``.

    Args:
        root: folder of the prepared data.
        size: edge of the cubes in voxels.
        layout: gives the replica (axis dp), the device and the seed.
        micro_batch: cubes per micro-batch of one replica.
        accumulation: micro-batches per step of a replica.

    Raises:
        DataError: the folder is incomplete, or has cubes of another size. While reading: a file is damaged.
        ConfigError: ``reader.shards`` does not divide the samples or the replicas.
    """
    found = read_manifest(root, size)
    split = Split(root, SPLITS["train"], size, reader.reads, reader.checksums)
    replicas, replica = layout.size("dp"), layout.index("dp")
    whole = EpochStream(len(split), micro_batch, accumulation, replicas, replica, layout.seed)
    stream = whole if reader.shards == 1 else ShardedStream(whole, reader.shards)
    batches = _Batches(split, reader, layout.device)

    def begin(number: int) -> PendingBatch:
        samples = [sample for _, sample in stream.samples_of(number)]
        return batches.begin_seeded(samples, micro_batch, whole.random_seed(number))

    return ThreadedTrainSource(
        stream, found.counts["eval_samples"], found.synthetic, batches.threads, begin, lambda: None
    )


def open_eval(root: Path, size: int, reader: CubeReaderConfig, layout: Layout) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank, after ``run_start``. Raises like :func:`open_train`."""
    read_manifest(root, size)
    split = Split(root, SPLITS["eval"], size, reader.reads, reader.checksums)
    shard = EvalShard(len(split), reader.eval_batch, layout.size("dp"), layout.index("dp"))
    batches = _Batches(split, reader, layout.device)

    def begin(samples: Sequence[int]) -> PendingBatch:
        return batches.begin_weighted(samples, reader.eval_batch)

    return ThreadedEvalSource(shard, batches.threads, begin, lambda: None)


def order_of_data(reader: CubeReaderConfig) -> str:
    """Return, as text, the settings that determine the order besides seed and batch size; checkpoints store them."""
    return f"{reader.shards} shards"
