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
distance of the cutoff. All padding atoms have about the same number of them, in training at most as many as an atom has
neighbours: a kernel's program takes all edges of an atom.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.oc20.graph import CUTOFF, NEIGHBOURS
from benchmarks.oc20.samples import ATOMS, EDGES, FREE, SPLITS, TRIPLETS, Split, read_manifest
from common.config.ranges import AtLeast, Each
from common.config.sections import ThreadedReaderConfig
from common.data.balanced_order import BalancedStream, PackedShard
from common.data.batches import DataSource, EvalSource
from common.data.capacities import Capacities, capacities_of, fitting, largest_sums, train_capacities
from common.data.manifest import NAME
from common.data.order import MicroBatches
from common.data.staging import SourceFile, StagingPlan
from common.data.threads import PendingBatch, SampleThreads, ThreadedEvalSource, ThreadedTrainSource
from common.distributed.layout import Layout


class GraphShape(NamedTuple):
    """Capacities of a batch: an atom and an edge are always padding."""

    atoms: int
    edges: int


@dataclass(frozen=True, kw_only=True)
class OcReaderConfig(ThreadedReaderConfig):
    """Options of the reader.

    Attributes:
        typical: atoms and edges of a typical structure: an evaluation batch has the capacity for ``eval_batch`` of
            them. The shapes of the training's batches are derived from the data; before the data are open, warm-up and
            ``bench`` take batches of such structures.
        eval_batch: most structures of one evaluation batch on one rank.
    """

    typical: Annotated[tuple[int, int], Each(AtLeast(1))]
    eval_batch: Annotated[int, AtLeast(1, "at least 1 structure")]

    def typical_shape(self, samples: int) -> GraphShape:
        """Return the shape for ``samples`` typical structures."""
        return GraphShape(*capacities_of(samples * count for count in self.typical))


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
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}

        def fill(slot: int) -> None:
            self._fill(samples[slot], firsts_S4[slot], arrays)

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

    def _fill(self, sample: int, first_4: NDArray[np.int64], arrays: dict[str, NDArray[Any]]) -> None:
        """Write a sample behind the ``first_4`` atoms and edges of others."""
        structure = self._split.read(sample)
        source, target = structure.edge_index
        (atom, edge), reverse = first_4[:TRIPLETS].astype(np.int32), structure.edge_reverse
        parts = {
            "atomic_number": (atom, structure.atomic_numbers),
            "position": (atom, structure.pos),
            "force": (atom, structure.force),
            "free": (atom, 1 - structure.fixed),
            "edge_source": (edge, source + atom),
            "edge_target": (edge, target + atom),
            "edge_shift": (edge, structure.cell_offsets.astype(np.float32) @ structure.cell),
            "edge_reverse": (edge, np.where(reverse == np.arange(len(reverse)), -1, reverse + edge)),
        }
        for name, (first, values) in parts.items():
            arrays[name][first : first + len(values)] = values


def staging_plan(root: Path) -> StagingPlan:
    """Return all files under ``root``: every node reads samples of the whole set, so that all have the same order."""
    names = [NAME, *read_manifest(root).files]
    return StagingPlan({}, [SourceFile(name, (root / name).stat().st_size) for name in names])


def open_train(
    root: Path, reader: OcReaderConfig, layout: Layout, micro_batch: int, accumulation: int = 1
) -> tuple[DataSource, list[GraphShape]]:
    """Open the training data under ``root`` for this rank; call it after ``run_start``.

    Args:
        root: folder of the prepared data.
        layout: gives the replica (axis dp), the device and the seed.
        micro_batch: structures per micro-batch of one replica, on average.
        accumulation: micro-batches per step of a replica.

    Returns:
        The data, and the shapes to capture. A larger batch runs without a graph.

    Raises:
        DataError: the folder is incomplete. While reading: a sample is damaged.
    """
    found = read_manifest(root)
    split = Split(root, SPLITS["train"])
    mine = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    counts_S4, batches = split.counts_S4, _Batches(split, reader, layout.device)
    shapes, shape_of = train_shapes(counts_S4, micro_batch, mine.streams)
    stream = BalancedStream(counts_S4[:, EDGES], mine, layout.seed, shape_of)

    def begin(number: int) -> PendingBatch:
        samples = [sample for _, sample in stream.samples_of(number)]
        together = list(itertools.chain(*stream.global_batch(stream.step_of(number))))
        shape, free = stream.key(number), int(counts_S4[together, FREE].sum())
        assert isinstance(shape, GraphShape)
        return batches.begin(samples, shape, max(1, free))

    source = ThreadedTrainSource(
        stream, found.counts["eval_samples"], found.synthetic, batches.threads, begin, split.close
    )
    return source, shapes


def train_shapes(
    counts_S4: NDArray[np.int32], micro_batch: int, streams: int
) -> tuple[list[GraphShape], Callable[[Sequence[Sequence[int]]], GraphShape]]:
    """Return the shapes of nearly all training batches, and the function of a global batch's micro-batches to theirs.

    Capacities are found for edges, and for the edges that the atoms have less than :data:`NEIGHBOURS`. Together they
    give the atoms: every batch has at least one padding atom for :data:`NEIGHBOURS` padding edges.
    """
    edges_S = counts_S4[:, EDGES]
    sizes_S2 = np.stack([edges_S, NEIGHBOURS * counts_S4[:, ATOMS] - edges_S], 1)
    known = train_capacities(sizes_S2, edges_S, micro_batch, streams)

    def shape(capacities: Capacities) -> GraphShape:
        (atoms,) = capacities_of([sum(capacities) // NEIGHBOURS])
        return GraphShape(atoms, capacities[0])

    def shape_of(micro_batches: Sequence[Sequence[int]]) -> GraphShape:
        return shape(fitting(known, largest_sums(sizes_S2, micro_batches).tolist()))

    return [shape(each) for each in known], shape_of


def open_eval(root: Path, reader: OcReaderConfig, layout: Layout) -> EvalSource:
    """Open the evaluation data under ``root`` for this rank, after ``run_start``.

    Raises:
        DataError: as :func:`open_train`, or a structure alone does not fit in an evaluation batch.
    """
    read_manifest(root)
    split = Split(root, SPLITS["eval"])
    shape, most = reader.typical_shape(reader.eval_batch), [reader.eval_batch * each for each in reader.typical]
    setting = "the atoms and edges of reader.typical times reader.eval_batch"
    replica = layout.size("dp"), layout.index("dp")
    shard = PackedShard(split.counts_S4[:, :TRIPLETS], most, reader.eval_batch, shape, setting, *replica)
    batches = _Batches(split, reader, layout.device)
    return ThreadedEvalSource(shard, batches.threads, lambda samples: batches.begin(samples, shape), split.close)
