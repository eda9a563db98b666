"""Training and evaluation data of CosmoFlow: batches of raw particle counts (:mod:`benchmarks.cosmoflow.samples`).

A batch has ``x``, int16 (B, D, H, W, C), and ``y``, float32 (B, P). The device computes log(1 + x). Batches of the
training also have ``seed``, int64 (), for the dropout, and those of the evaluation ``weight``, float32 (B,): 1 for a
sample, 0 for padding.

Axes: B samples; D, H, W voxels; C redshifts; P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from benchmarks.cosmoflow.samples import PARAMETERS, REDSHIFTS, SPLITS, Split, read_manifest
from common.config.ranges import AtLeast
from common.data.batches import DataSource, EvalSource
from common.data.direct_reader import Mode
from common.data.order import EpochStream, EvalShard
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout


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
        eval_batch: cubes of one evaluation batch on one rank.
    """

    threads: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1, "at least 1 batch")]
    reads: Mode
    checksums: bool
    eval_batch: Annotated[int, AtLeast(1, "at least 1 cube")]


class _Batches:
    """Makes batches of a split in threads of this process."""

    def __init__(self, split: Split, reader: CubeReaderConfig, device: torch.device) -> None:
        self._split, self._pin_memory = split, device.type == "cuda"
        self.threads = SampleThreads(reader.threads, reader.prefetch)

    def begin(self, samples: Sequence[int], slots: int, others: dict[str, Tensor]) -> PendingBatch:
        """Start to read ``samples`` into the first slots of a batch; ``x`` and ``y`` of the other slots are zero.

        Args:
            others: further tensors of the batch.
        """
        size = self._split.size
        x_BDHWC = torch.empty((slots, size, size, size, REDSHIFTS), dtype=torch.int16, pin_memory=self._pin_memory)
        y_BP = torch.empty((slots, PARAMETERS), pin_memory=self._pin_memory)
        for tensor in (x_BDHWC, y_BP):
            tensor[len(samples) :].zero_()

        def fill(slot: int) -> None:
            self._split.read(samples[slot], x_BDHWC[slot], y_BP[slot])

        small = {name: tensor.pin_memory() if self._pin_memory else tensor for name, tensor in others.items()}
        return self.threads.begin({"x": x_BDHWC, "y": y_BP, **small}, len(samples), fill)


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
    """
    found = read_manifest(root, size)
    split = Split(root, SPLITS["train"], size, reader.reads, reader.checksums)
    stream = EpochStream(len(split), micro_batch, accumulation, layout.size("dp"), layout.index("dp"), layout.seed)
    batches = _Batches(split, reader, layout.device)

    def begin(number: int) -> PendingBatch:
        samples = [sample for _, sample in stream.samples_of(number)]
        return batches.begin(samples, micro_batch, {"seed": torch.tensor(stream.random_seed(number))})

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
        weight_B = (torch.arange(reader.eval_batch) < len(samples)).float()
        return batches.begin(samples, reader.eval_batch, {"weight": weight_B})

    return ThreadedEvalSource(shard, batches.threads, begin, lambda: None)
