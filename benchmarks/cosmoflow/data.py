"""Training and evaluation data of CosmoFlow: batches of raw particle counts (:mod:`benchmarks.cosmoflow.samples`).

A batch has ``x``, int16 (B, D, H, W, C), and ``y``, float32 (B, P). The device computes log(1 + x). Batches of the
training also have ``seed``, int64 (), for the dropout, and those of the evaluation ``weight``, float32 (B,): 1 for a
sample, 0 for padding.

Axes: B samples; D, H, W voxels; C redshifts; P parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from benchmarks.cosmoflow.samples import (
    CUBE_SUFFIX,
    LIST,
    PARAMETERS,
    PREPARE_COMMAND,
    REDSHIFTS,
    REMEDY,
    SPLITS,
    Split,
    label_of,
    read_list,
    read_manifest,
)
from common.config.ranges import AtLeast
from common.config.sections import ThreadedReaderConfig
from common.data import manifest
from common.data.batches import DataSource, EvalSource
from common.data.direct_reader import Mode
from common.data.manifest import Manifest
from common.data.order import EpochStream
from common.data.staging import NodeOrder, SourceFile, StagingPlan, described_files, open_split
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.formats.tfrecord import GZIP_MAGIC
from common.untrusted.archives import gunzip
from common.untrusted.regular_file import size_of


@dataclass(frozen=True, kw_only=True)
class CubeReaderConfig(ThreadedReaderConfig):
    """Options of the reader.

    Attributes:
        reads: ``direct`` reads past the page cache (O_DIRECT), for data larger than the memory; ``buffered`` reads
            through it; ``auto`` is ``direct`` where the file system supports it.
        checksums: compute the CRC-32C of every TFRecord, tens of ms per cube of 128^3 voxels. Without it, only
            ``verify`` and ``prepare`` do.
        eval_batch: cubes of one evaluation batch on one rank.
    """

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


def _open(
    root: Path, split: str, size: int, reader: CubeReaderConfig, layout: Layout
) -> tuple[Manifest, Split, NodeOrder]:
    """Return the manifest, the samples of a split below ``root``, or this node's shard, and how replicas share them."""
    found = read_manifest(root, size)
    staged, order = open_split(
        root, split, found.counts[f"{split}_samples"], layout.size("dp"), layout.index("dp"), layout.seed
    )
    files: Sequence[tuple[str, int | None]]
    # Staging may have inflated the files, so that their sizes are not known.
    files = _listed(root, split, found) if staged is None else [(name, None) for name in staged]
    return found, Split(root / SPLITS[split], files, size, reader.reads, reader.checksums), order


def _listed(root: Path, split: str, found: Manifest) -> list[tuple[str, int]]:
    path = root / SPLITS[split] / LIST
    return manifest.read_listed(path, read_list, found.counts[f"{split}_samples"], PREPARE_COMMAND)


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
    found, split, order = _open(root, "train", size, reader, layout)
    replicas, replica = layout.size("dp"), layout.index("dp")
    train_samples, eval_samples = (found.counts[f"{name}_samples"] for name in SPLITS)
    stream = EpochStream(train_samples, micro_batch, accumulation, replicas, replica, layout.seed)
    mine = order.stream(len(split), micro_batch, accumulation)
    batches = _Batches(split, reader, layout.device)

    def begin(number: int) -> PendingBatch:
        samples = [sample for _, sample in mine.samples_of(number)]
        return batches.begin(samples, micro_batch, {"seed": torch.tensor(stream.random_seed(number))})

    return ThreadedTrainSource(stream, eval_samples, found.synthetic, batches.threads, begin, lambda: None)


def open_eval(root: Path, size: int, reader: CubeReaderConfig, layout: Layout) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank, after ``run_start``. Raises like :func:`open_train`."""
    found, split, order = _open(root, "eval", size, reader, layout)
    shard = order.eval_shard(found.counts["eval_samples"], reader.eval_batch)
    batches = _Batches(split, reader, layout.device)

    def begin(samples: Sequence[int]) -> PendingBatch:
        weight_B = (torch.arange(reader.eval_batch) < len(samples)).float()
        return batches.begin(samples, reader.eval_batch, {"weight": weight_B})

    return ThreadedEvalSource(shard, batches.threads, begin, lambda: None)


def staging_plan(root: Path, size: int) -> StagingPlan:
    """Return the samples under ``root`` for staging, which inflates TFRecords with gzip.

    Args:
        size: edge of the cubes in voxels.

    Raises:
        DataError: the folder is incomplete, or has cubes of another size or another number than its manifest.
    """
    found, samples = read_manifest(root, size), {}
    for split, folder in SPLITS.items():
        samples[split] = [SourceFile(f"{folder}/{name}", length) for name, length in _listed(root, split, found)]
        labels = [label_of(file.name) for file in samples[split] if file.name.endswith(CUBE_SUFFIX)]
        if labels:  # of as many files as the split, so that staging keeps cube and parameters together
            length = size_of(root / labels[0], REMEDY)  # all labels of a split have the same size
            samples[f"{split} labels"] = [SourceFile(name, length) for name in labels]
    return StagingPlan(samples, described_files(root, found), _inflated)


def _inflated(content: memoryview) -> Iterable[bytes | memoryview]:
    return gunzip(content) if content[: len(GZIP_MAGIC)] == GZIP_MAGIC else [content]
