"""Training and evaluation data of OpenCatalyst: several structures in one graph, padded to one of a few shapes.

A batch of shape (A atoms, E edges) has

- ``atomic_number`` int32 (A,), ``position`` and ``force`` float32 (A, 3), ``free`` float32 (A,): 1 for an atom that is
  neither fixed nor padding;
- ``edge_source``, ``edge_target`` int32 (E,), sorted by target, and ``edge_shift`` float32 (E, 3): the edge j -> i has
  the vector ``position[j] - position[i] + shift``;
- ``edge_reverse`` int32 (E,), the edge i -> j with the opposite shift, or -1;
- ``samples`` float32 (), the number of structures, and in training ``global_free`` float32 (), the number of free atoms
  of the global batch.

The last atom and the last edge are always padding. Each padding edge connects a padding atom with itself, at the
distance of the cutoff. All padding atoms have about the same number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.oc20.graph import CUTOFF, reverse_edges
from benchmarks.oc20.samples import ATOMS, EDGES, FREE, SPLITS, TRIPLETS, Split, read_manifest
from common.config.ranges import AtLeast
from common.data.balanced_order import BalancedStream, PackedShard
from common.data.batches import DataSource, EvalSource
from common.data.manifest import NAME
from common.data.order import MicroBatches
from common.data.staging import SourceFile, StagingPlan
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout
from common.errors import ConfigError


@dataclass(frozen=True, order=True)
class GraphShape:
    """Capacities of a batch, with the padding."""

    atoms: int
    edges: int

    def holds(self, totals: Sequence[int]) -> bool:
        """Return whether structures with these total counts fit, and an atom and an edge of padding."""
        return totals[ATOMS] < self.atoms and totals[EDGES] < self.edges

    @classmethod
    def of(cls, each: Sequence[int], samples: int) -> GraphShape:
        """Return the shape for ``samples`` structures with ``each`` atoms and edges on average."""
        atoms, edges = (samples * count for count in each)
        return cls(atoms + 1, edges + 1)


@dataclass(frozen=True, kw_only=True)
class OcReaderConfig:
    """Options of the reader.

    Attributes:
        threads: threads that read samples.
        prefetch: batches that are read ahead.
        shapes: capacities of the training's batches in atoms and edges per structure, in ascending order. A larger
            batch has a multiple of the last one.
        eval_batch: most structures of one evaluation batch on one rank.
        eval_shape: capacities of all evaluation batches in atoms and edges per structure.
    """

    threads: Annotated[int, AtLeast(1)]
    prefetch: Annotated[int, AtLeast(1, "at least 1 batch")]
    shapes: tuple[tuple[int, int], ...]
    eval_batch: Annotated[int, AtLeast(1, "at least 1 structure")]
    eval_shape: tuple[int, int]

    def __post_init__(self) -> None:
        for name, shapes in (("eval_shape", (self.eval_shape,)), ("shapes", self.shapes)):
            if not shapes or min(map(min, shapes)) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: at least 1 atom and 1 edge per structure")
        if any(low >= high for one, other in pairwise(self.shapes) for low, high in zip(one, other, strict=True)):
            raise ConfigError(f"shapes={self.shapes}: atoms and edges in ascending order")

    def train_shapes(self, micro_batch: int) -> list[GraphShape]:
        """Return the shapes of the training's batches."""
        return [GraphShape.of(each, micro_batch) for each in self.shapes]

    @property
    def evaluation_shape(self) -> GraphShape:
        """The shape of all evaluation batches."""
        return GraphShape.of(self.eval_shape, self.eval_batch)


def fitting(shapes: Sequence[Sequence[int]], samples: int, totals: Sequence[int]) -> GraphShape:
    """Return the first shape that holds structures with the ``totals``, or else that of a multiple of the last one.

    Args:
        shapes: atoms and edges per structure.
        samples: structures for which the capacities are meant.
    """
    for each in shapes:
        if (shape := GraphShape.of(each, samples)).holds(totals):
            return shape
    most = max(-(-total // (samples * each)) for total, each in zip(totals, shapes[-1], strict=False))
    return GraphShape.of(shapes[-1], samples * most)


class _Batches:
    """Makes batches of a split in threads of this process."""

    def __init__(self, split: Split, reader: OcReaderConfig, device: torch.device) -> None:
        self._split, self._pin_memory = split, device.type == "cuda"
        self.threads = SampleThreads(reader.threads, reader.prefetch)

    def begin(self, samples: Sequence[int], shape: GraphShape, global_free: int | None = None) -> PendingBatch:
        """Start to read ``samples`` into a batch of ``shape``.

        Args:
            global_free: the batch's ``global_free``; None for a batch of the evaluation.
        """
        counts_S4 = self._split.counts_S4[list(samples)].astype(np.int64)
        firsts_S4 = np.cumsum(counts_S4, 0) - counts_S4
        atoms, edges = counts_S4[:, :TRIPLETS].sum(0).tolist()
        tensors = self._padding(shape, atoms, edges)
        tensors["samples"] = torch.tensor(float(len(samples)))
        if global_free is not None:
            tensors["global_free"] = torch.tensor(float(global_free))
        if self._pin_memory:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}

        def fill(slot: int) -> None:
            self._fill(samples[slot], firsts_S4[slot], tensors)

        return self.threads.begin(tensors, len(samples), fill)

    def _padding(self, shape: GraphShape, used_atoms: int, used_edges: int) -> dict[str, Tensor]:
        atoms, edges = shape.atoms, shape.edges
        padding = edges - used_edges
        atom_E = torch.zeros(edges, dtype=torch.int32)
        atom_E[used_edges:] = used_atoms + torch.arange(padding) * (atoms - used_atoms) // padding
        shift_E3 = torch.zeros(edges, 3)
        shift_E3[:, 0] = CUTOFF
        return {
            "atomic_number": torch.zeros(atoms, dtype=torch.int32),
            "position": torch.zeros(atoms, 3),
            "force": torch.zeros(atoms, 3),
            "free": torch.zeros(atoms),
            "edge_source": atom_E,
            "edge_target": atom_E.clone(),
            "edge_shift": shift_E3,
            "edge_reverse": torch.full((edges,), -1, dtype=torch.int32),
        }

    def _fill(self, sample: int, first_4: NDArray[np.int64], tensors: dict[str, Tensor]) -> None:
        """Write a sample behind the ``first_4`` atoms and edges of others."""
        structure = self._split.read(sample)
        source, target = structure.edges.index_2E
        reverse = reverse_edges(structure.edges)
        atom, edge = first_4[:TRIPLETS].tolist()
        parts = {
            "atomic_number": (atom, structure.atomic_numbers),
            "position": (atom, structure.pos),
            "force": (atom, structure.force),
            "free": (atom, 1 - structure.fixed),
            "edge_source": (edge, source + atom),
            "edge_target": (edge, target + atom),
            "edge_shift": (edge, structure.cell_offsets.astype(np.float32) @ structure.cell),
            "edge_reverse": (edge, np.where(reverse < 0, -1, reverse + edge)),
        }
        for name, (first, values) in parts.items():
            tensors[name].numpy()[first : first + len(values)] = values


def staging_plan(root: Path) -> StagingPlan:
    """Return all files under ``root``: every node reads samples of the whole set, so that all have the same order."""
    names = [NAME, *read_manifest(root).files]
    return StagingPlan({}, [SourceFile(name, (root / name).stat().st_size) for name in names])


def open_train(
    root: Path, reader: OcReaderConfig, layout: Layout, micro_batch: int, accumulation: int = 1
) -> DataSource:
    """Open the training data under ``root`` for this rank; call it after ``run_start``.

    Args:
        root: folder of the prepared data.
        layout: gives the replica (axis dp), the device and the seed.
        micro_batch: structures per micro-batch of one replica, on average.
        accumulation: micro-batches per step of a replica.

    Raises:
        DataError: the folder is incomplete. While reading: a sample is damaged.
    """
    found = read_manifest(root)
    split = Split(root, SPLITS["train"])
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    counts_S4, batches = split.counts_S4, _Batches(split, reader, layout.device)

    def shape_of(samples: Sequence[int]) -> GraphShape:
        return fitting(reader.shapes, micro_batch, counts_S4[samples].sum(0).tolist())

    stream = BalancedStream(counts_S4[:, EDGES], mine, layout.seed, shape_of)

    def begin(number: int) -> PendingBatch:
        samples = [sample for _, sample in stream.samples_of(number)]
        free = int(counts_S4[stream.global_samples(number), FREE].sum())
        return batches.begin(samples, shape_of(samples), max(1, free))

    return ThreadedTrainSource(
        stream, found.counts["eval_samples"], found.synthetic, batches.threads, begin, split.close
    )


def open_eval(root: Path, reader: OcReaderConfig, layout: Layout) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank, after ``run_start``.

    Raises:
        DataError: as :func:`open_train`, or a structure alone does not fit ``reader.eval_shape``.
    """
    read_manifest(root)
    split = Split(root, SPLITS["eval"])
    shape, most = reader.evaluation_shape, [reader.eval_batch * each for each in reader.eval_shape]
    setting = "the atoms and edges of reader.eval_shape times reader.eval_batch"
    replica = layout.size("dp"), layout.index("dp")
    shard = PackedShard(split.counts_S4[:, :TRIPLETS], most, reader.eval_batch, shape, setting, *replica)
    batches = _Batches(split, reader, layout.device)
    return ThreadedEvalSource(shard, batches.threads, lambda samples: batches.begin(samples, shape), split.close)
