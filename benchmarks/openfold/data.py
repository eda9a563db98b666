"""Training and evaluation data of OpenFold: batches of the features in :mod:`benchmarks.openfold.features`.

Processes make the features a few micro-batches ahead (:mod:`common.data.ready_queue`). A chain with a large alignment
takes a hundred times the usual time. It comes late, and the micro-batches behind it come first, unless the run is
deterministic.

The key of a training batch is its number of passes. The key of an evaluation batch is (passes, residues).
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from benchmarks.openfold.features import FeatureSizes, feature_shapes
from benchmarks.openfold.pipeline import Features, Made, Pipeline, Sample, Sizes
from benchmarks.openfold.sampler import Draws, passes_of, weights_of
from benchmarks.openfold.samples import (
    DAYS,
    KALIGN,
    OBSOLETE,
    REALIGNED,
    SET_COLUMNS,
    SPLITS,
    STRUCTURE_COLUMNS,
    decode_name,
    read_manifest,
    read_obsolete,
    read_table,
)
from common.config.ranges import AtLeast
from common.data.batches import Block, DataSource, EvalSource, HostBatch
from common.data.order import GroupedShard, MicroBatches
from common.data.ready_queue import ReadyQueue
from common.data.staging import StagingPlan, described_files
from common.distributed.layout import Layout
from common.errors import DataError


@dataclass(frozen=True, kw_only=True)
class OpenFoldReaderConfig:
    """Options of the reader.

    Attributes:
        workers: processes of a rank that make features.
        prefetch: micro-batches that are made ahead, for each process.
        window: micro-batches of a rank among which a late one can be exchanged; no micro-batch leaves its window.
        eval_multiple: residues; chains of the evaluation are padded to a multiple.
    """

    workers: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1, "at least 1 micro-batch")]
    window: Annotated[int, AtLeast(1, "at least 1 micro-batch")]
    eval_multiple: Annotated[int, AtLeast(1, "at least 1 residue")]


class _Chains:
    """The chains of a set.

    Raises:
        DataError: the folder is incomplete or damaged, or Kalign is missing where ``prepare`` had it.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.found = read_manifest(root)
        self._root, self._table = root, read_table(root / SPLITS[split], len(SET_COLUMNS))
        self.residues_S, self.cluster_S = self._table[:, 3], self._table[:, 4]

    def __len__(self) -> int:
        return len(self._table)

    def pipeline(self, sizes: Sizes, training: bool) -> Pipeline:
        """Return a pipeline for chains of the set."""
        program = None
        if self.found.source.get(KALIGN) == REALIGNED and (program := shutil.which(KALIGN)) is None:
            raise DataError(f"{self._root} was prepared with Kalign, and {KALIGN} is not in PATH; install it here, too")
        table = read_table(self._root / DAYS, len(STRUCTURE_COLUMNS)).tolist()
        known = [(decode_name(structure), decode_name(chain), day) for structure, chain, day in table]
        released = {structure: day for structure, _, day in known}
        chains = {f"{structure}_{chain}" for structure, chain, _ in known}
        return Pipeline(self._root, sizes, training, released, chains, read_obsolete(self._root / OBSOLETE), program)

    def sample(self, number: int, seed: int) -> Sample:
        """Return the chain with this number in the set as a piece of work."""
        structure, chain, day, _, _, database, *spans = self._table[number].tolist()
        files = list(zip(spans[::2], spans[1::2], strict=True))
        return Sample(decode_name(structure), decode_name(chain), day, database, files, seed)


class _LeftOut:
    """Counts the template hits that all processes of a source left out because they could not be realigned.

    Args:
        chains: the source's chains, for messages.
    """

    def __init__(self, chains: str) -> None:
        self._chains, self._count, self._reported = chains, 0, 0

    def add(self, left_out: Sequence[str]) -> None:
        """Count these hits; report the first one, and then whenever the number of hits has doubled."""
        self._count += len(left_out)
        if left_out and self._count >= 2 * self._reported:
            self.report(f"; the last one was {left_out[-1]}")

    def report(self, more: str = "") -> None:
        """Print the number of hits, unless it has been printed."""
        if self._count > self._reported:
            self._reported = self._count
            print(f"template hits of {self._chains} that could not be realigned: {self._count}{more}", file=sys.stderr)


class TrainSource:
    """Training batches of one replica; a :class:`common.data.batches.DataSource` whose order depends on their times.

    Args:
        mine: the micro-batches of this replica.
        seed: seed of the draws.
    """

    def __init__(
        self, chains: _Chains, facts: FeatureSizes, reader: OpenFoldReaderConfig, mine: MicroBatches, seed: int,
        eval_samples: int, deterministic: bool, pin_memory: bool,
    ) -> None:  # fmt: skip
        self.train_samples, self.eval_samples = len(chains), eval_samples
        self.synthetic = chains.found.synthetic
        self._chains, self._facts, self._reader, self._mine, self._seed = chains, facts, reader, mine, seed
        self._in_order, self._pin_memory = deterministic, pin_memory
        self._draws = Draws(weights_of(chains.residues_S, chains.cluster_S), seed)
        sizes = Sizes(
            facts.crop_size, 1, facts.msa_clusters, facts.extra_msa, facts.templates, facts.recycling_iters + 1
        )
        self._pipeline = chains.pipeline(sizes, training=True)
        self._queue: ReadyQueue[list[Sample], Made] | None = None
        self._left_out = _LeftOut("training chains")
        self._taken, self._late = 0, list[int]()

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``; raises errors of the processes."""
        first = self._mine.first(block)
        for position in range(start, self._mine.count(block)):
            number = first + position
            _, made = self._queue_at(number).take()
            self._left_out.add(made.left_out)
            self._taken += 1
            passes = passes_of(self._mine.step_of(number)[0], self._seed, self._facts.recycling_iters)
            tensors = {
                name: values[:, :passes] if _of_passes(name) else values
                for name, values in _tensors(made.features).items()
            }
            tensors["dropout_seed"] = torch.tensor(self._mine.random_seed(self._seed, number))
            yield HostBatch(_placed(tensors, self._pin_memory), self._nominal, position, passes)

    def late(self, taken: int) -> list[int]:
        """Return the micro-batches that were late after ``taken`` of the whole training, for :meth:`resume`."""
        return self._late if self._queue is None else self._queue.late(taken)

    def resume(self, late: Sequence[int]) -> None:
        """Continue with micro-batches that were ``late`` when the earlier run was interrupted."""
        self._late = list(late)

    def close(self) -> None:
        """Stop the processes, and report the number of template hits that were left out."""
        self._stop()
        self._left_out.report()

    def _stop(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    @property
    def _nominal(self) -> int:
        return self._mine.micro_batch * self._mine.replicas

    def _queue_at(self, number: int) -> ReadyQueue[list[Sample], Made]:
        """Return the queue that has delivered ``number`` micro-batches: the current one, or a new one."""
        if self._queue is not None and self._taken == number:
            return self._queue
        self._stop()
        self._taken, reader = number, self._reader
        self._queue = ReadyQueue(
            self._pipeline, self._samples_of, reader.workers, reader.workers * (1 + reader.prefetch), reader.window,
            self._in_order, number, self._late,
        )  # fmt: skip
        self._late = []
        return self._queue

    def _samples_of(self, number: int) -> list[Sample]:
        first = self._mine.global_index(number) * self._mine.micro_batch
        return [self._chains.sample(*self._draws[first + slot]) for slot in range(self._mine.micro_batch)]


class ChainEvalSource:
    """Evaluation chains of one replica, kept in memory after the first evaluation; an :class:`EvalSource`."""

    def __init__(
        self, chains: _Chains, facts: FeatureSizes, reader: OpenFoldReaderConfig, replicas: int, replica: int,
        pin_memory: bool,
    ) -> None:  # fmt: skip
        self.eval_samples = len(chains)
        self._chains, self._reader, self._pin_memory = chains, reader, pin_memory
        passes, multiple = facts.recycling_iters + 1, reader.eval_multiple
        sizes = Sizes(None, multiple, facts.msa_clusters, facts.extra_msa, facts.templates, passes)
        self._pipeline = chains.pipeline(sizes, training=False)
        lengths = chains.residues_S.tolist()
        self._order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        keys = [(passes, -(-lengths[number] // multiple) * multiple) for number in self._order]
        self._shard = GroupedShard(keys, 1, replicas, replica)
        self._kept: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return self._shard.batches

    def __iter__(self) -> Iterator[HostBatch]:
        """Yield the batches of one evaluation, each with one chain; padding is a chain with ``samples`` 0."""
        if not self._kept:
            self._kept = self._read()
        for position, tensors in enumerate(self._kept):
            yield HostBatch(tensors, self._shard.replicas, position, self._shard.key(position))

    def close(self) -> None:
        """Forget the chains."""
        self._kept = []

    def _read(self) -> list[dict[str, Tensor]]:
        workers = min(self._reader.workers, len(self))
        queue = ReadyQueue(self._pipeline, self._samples_of, workers, len(self), len(self), end=len(self))
        try:
            made = dict(queue.take() for _ in range(len(self)))
        finally:
            queue.close()
        left_out = _LeftOut("evaluation chains")
        left_out.add([reason for batch in made.values() for reason in batch.left_out])
        kept = []
        for batch in range(len(self)):
            tensors = _tensors(made.pop(batch).features) | {"dropout_seed": torch.tensor(0)}
            if not self._shard.valid(batch):
                tensors["samples"] = torch.zeros(1)
            kept.append(_placed(tensors, self._pin_memory))
        return kept

    def _samples_of(self, batch: int) -> list[Sample]:
        position = next(iter(self._shard.samples(batch)), 0)  # the first chain has the key of all padding
        number = self._order[position]
        sample = self._chains.sample(number, 0)
        digest = hashlib.sha256(f"{sample.pdb_id}_{sample.author}".encode()).digest()
        return [sample._replace(seed=int.from_bytes(digest[:8], "little") >> 1)]


class ReceivingSource:
    """Zeros in the shapes of training batches, for ranks that receive their values from another rank."""

    def __init__(
        self, facts: FeatureSizes, mine: MicroBatches, seed: int, found_samples: tuple[int, int, bool]
    ) -> None:
        self.train_samples, self.eval_samples, self.synthetic = found_samples
        self._facts, self._mine, self._seed = facts, mine, seed

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield micro-batches of zeros of ``block`` from position ``start``."""
        facts, mine = self._facts, self._mine
        for position in range(start, mine.count(block)):
            passes = passes_of(mine.step_of(mine.first(block) + position)[0], self._seed, facts.recycling_iters)
            shapes = feature_shapes(facts, mine.micro_batch, passes, facts.crop_size)
            tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
            yield HostBatch(tensors, mine.micro_batch * mine.replicas, position, passes)

    def close(self) -> None:
        """Do nothing."""


def open_train(
    root: Path, reader: OpenFoldReaderConfig, facts: FeatureSizes, layout: Layout, micro_batch: int,
    accumulation: int = 1, deterministic: bool = False,
) -> DataSource:  # fmt: skip
    """Open the training data under ``root`` for this rank; call it after ``run_start``.

    Args:
        root: folder of the prepared data.
        layout: gives the replica (axis dp), the device and the seed. Only the first rank on cp reads; the batches of
            the others are zeros, and the workload broadcasts the values.
        micro_batch: chains per micro-batch of one replica.
        accumulation: micro-batches per step of a replica.
        deterministic: wait for late micro-batches, so that the order does not depend on times.

    Raises:
        DataError: the folder is incomplete or damaged. While reading: a file is damaged, or the processes failed.
    """
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    found = read_manifest(root)
    train_samples, eval_samples = found.counts["train_samples"], found.counts["eval_samples"]
    if layout.index("cp"):
        return ReceivingSource(facts, mine, layout.seed, (train_samples, eval_samples, found.synthetic))
    pin_memory = layout.device.type == "cuda"
    chains = _Chains(root, "train")
    return TrainSource(chains, facts, reader, mine, layout.seed, eval_samples, deterministic, pin_memory)


def open_eval(root: Path, reader: OpenFoldReaderConfig, facts: FeatureSizes, layout: Layout) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank, after ``run_start``. Raises like :func:`open_train`."""
    replica, pin_memory = (layout.size("dp"), layout.index("dp")), layout.device.type == "cuda"
    return ChainEvalSource(_Chains(root, "eval"), facts, reader, *replica, pin_memory)


def staging_plan(root: Path) -> StagingPlan:
    """Return all files under ``root``: every node draws from the whole set."""
    return StagingPlan({}, described_files(root, read_manifest(root)))


def _of_passes(name: str) -> bool:
    """Return whether a feature has an axis of passes."""
    return name.startswith(("msa_", "extra_")) or name in ("true_msa", "bert_mask")


def _tensors(features: Features) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in features.items()}


def _placed(tensors: dict[str, Tensor], pin_memory: bool) -> dict[str, Tensor]:
    """Return contiguous tensors, in pinned memory for a GPU."""
    return {name: t.contiguous().pin_memory() if pin_memory else t.contiguous() for name, t in tensors.items()}
