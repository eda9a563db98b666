"""Training and evaluation data of DeepCAM: batches of images as they are stored (:mod:`benchmarks.deepcam.samples`).

A batch has ``x``, float32 (B, H, W, C), ``y``, uint8 (B, H, W), and ``shift`` and ``scale``, float32 (C,), with which
the device normalises: ``scale * (x - shift)``. Batches of the evaluation also have ``weight``, float32 (B,): 1 for a
sample, 0 for padding.

Axes: B samples; H, W pixels; C variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from benchmarks.deepcam.samples import (
    CHANNELS,
    LIST,
    PREPARE_COMMAND,
    SPLITS,
    STATISTICS,
    SampleReader,
    Size,
    files_of,
    lengths_of,
    read_list,
    read_manifest,
    read_range,
)
from common.config.ranges import AtLeast
from common.config.sections import ThreadedReaderConfig
from common.data import manifest
from common.data.batches import DataSource, EvalSource
from common.data.direct_reader import Mode
from common.data.manifest import Manifest
from common.data.order import EpochStream
from common.data.staging import SourceFile, StagingPlan, described_files, open_split
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ClimateReaderConfig(ThreadedReaderConfig):
    """Options of the reader.

    Attributes:
        reads: ``direct`` reads past the page cache (O_DIRECT), for data larger than the memory; ``buffered`` reads
            through it; ``auto`` is ``direct`` where the file system supports it.
        eval_batch: images of one evaluation batch on one rank.
    """

    reads: Mode
    eval_batch: Annotated[int, AtLeast(1, "at least 1 image")]


class _Batches:
    """Makes batches of a split, or of this node's shard of it after staging, in threads of this process.

    Attributes:
        names: first file of each sample.
        order: how the replicas share the samples.

    Raises:
        DataError: as :func:`open_train`.
    """

    def __init__(
        self, root: Path, split: str, found: Manifest, size: Size, reader: ClimateReaderConfig, layout: Layout
    ) -> None:
        self._pin_memory = layout.device.type == "cuda"
        staged, self.order = open_split(
            root, split, found.counts[f"{split}_samples"], layout.size("dp"), layout.index("dp"), layout.seed
        )
        self.names = _listed(root, split, found) if staged is None else staged
        self._samples = SampleReader(root / SPLITS[split], size, reader.reads)
        shift_C, scale_C = read_range(root / STATISTICS)
        self._range = {"shift": self._pinned(shift_C), "scale": self._pinned(scale_C)}
        self.threads = SampleThreads(reader.threads, reader.prefetch)

    def begin(self, samples: Sequence[int], slots: int) -> PendingBatch:
        """Start to read ``samples`` into the first slots of a batch; ``x`` and ``y`` of the other slots are zero."""
        shape, pin_memory = (slots, *self._samples.size), self._pin_memory
        x_BHWC = torch.empty((*shape, CHANNELS), pin_memory=pin_memory)
        y_BHW = torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
        for tensor in (x_BHWC, y_BHW):
            tensor[len(samples) :].zero_()

        def fill(slot: int) -> None:
            self._samples.read(self.names[samples[slot]], x_BHWC[slot], y_BHW[slot])

        return self.threads.begin({"x": x_BHWC, "y": y_BHW, **self._range}, len(samples), fill)

    def begin_weighted(self, samples: Sequence[int], slots: int) -> PendingBatch:
        """Start a batch of the evaluation; see :meth:`begin`."""
        begun = self.begin(samples, slots)
        begun.tensors["weight"] = self._pinned((torch.arange(slots) < len(samples)).float())
        return begun

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pin_memory else tensor


def _listed(root: Path, split: str, found: Manifest) -> list[str]:
    path = root / SPLITS[split] / LIST
    return list(manifest.read_listed(path, read_list, found.counts[f"{split}_samples"], PREPARE_COMMAND))


def open_train(
    root: Path, size: Size, reader: ClimateReaderConfig, layout: Layout, micro_batch: int, accumulation: int = 1
) -> DataSource:
    """Open the training data under ``root`` for this rank; call it after ``run_start``.

    Args:
        root: folder of the prepared data.
        size: height and width of the images in pixels.
        layout: gives the replica (axis dp), the device and the seed.
        micro_batch: images per micro-batch of one replica.
        accumulation: micro-batches per step of a replica.

    Raises:
        DataError: the folder is incomplete, has images of another size, or statistics of other channels. While
            reading: a file is damaged.
    """
    found = read_manifest(root, size)
    batches = _Batches(root, "train", found, size, reader, layout)
    samples, eval_samples = (found.counts[f"{name}_samples"] for name in SPLITS)
    stream = EpochStream(samples, micro_batch, accumulation, layout.size("dp"), layout.index("dp"))  # only to count
    mine = batches.order.stream(len(batches.names), micro_batch, accumulation)

    def begin(number: int) -> PendingBatch:
        return batches.begin([sample for _, sample in mine.samples_of(number)], micro_batch)

    return ThreadedTrainSource(stream, eval_samples, found.synthetic, batches.threads, begin, lambda: None)


def open_eval(root: Path, size: Size, reader: ClimateReaderConfig, layout: Layout) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank, after ``run_start``. Raises like :func:`open_train`."""
    found = read_manifest(root, size)
    batches = _Batches(root, "eval", found, size, reader, layout)
    shard = batches.order.eval_shard(found.counts["eval_samples"], reader.eval_batch)

    def begin(samples: Sequence[int]) -> PendingBatch:
        return batches.begin_weighted(samples, reader.eval_batch)

    return ThreadedEvalSource(shard, batches.threads, begin, lambda: None)


def staging_plan(root: Path, size: Size) -> StagingPlan:
    """Return the samples under ``root`` for staging. Data and labels of a sample are staged on the same node.

    Args:
        size: height and width of the images in pixels.

    Raises:
        DataError: the folder is incomplete, or has images of another size or another number than its manifest.
    """
    found, shards = read_manifest(root, size), {}
    for split, folder in SPLITS.items():
        paths = [root / folder / name for name in _listed(root, split, found)]
        # All samples of a split have files of the same sizes. The splits of a pair are of equal length.
        for kind, length in enumerate(lengths_of(paths[0])):
            names = (f"{folder}/{files_of(path)[kind].name}" for path in paths)
            shards[f"{split} labels" if kind else split] = [SourceFile(name, length) for name in names]
    return StagingPlan(shards, described_files(root, found))
