"""Capacities of blocks, and sampling of blocks one batch ahead.

Capacities are upper bounds from the fanouts, or estimates with a margin from some sampled batches.

Counts stay on the device. The overflow flag of each block is copied to pinned memory, and read after the next block
has been queued. A block that overflows is sampled again with larger capacities. The result is the same block, because
every random draw is a function of seed, relation, node and slot.

Whether collectives are captured must be the same on all participating ranks (NCCL user guide, "Using NCCL with CUDA
Graphs"). In a step with collectives, all ranks therefore leave the captured shape as soon as one of them must.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock, Schema
from benchmarks.rgat.ops.sample.reference import NeighborSampler


def largest_shape(graph: Graph, seeds: int, fanouts: Sequence[int]) -> BlockShape:
    """Return capacities that no batch of ``seeds`` seeds can exceed; ``fanouts`` go from the seeds outward."""
    schema = graph.schema
    sources, targets = np.array(schema.sources), np.array(schema.targets)
    new = np.zeros(len(schema.types), np.int64)
    new[schema.seed_type] = seeds
    limits = np.maximum(graph.nodes, new)  # there may be more seeds than nodes
    nodes, edges, rows = [new], [np.zeros(len(sources), np.int64)], []
    for fanout in fanouts:
        drawn = new[targets] * fanout
        edges.append(np.minimum(edges[-1] + drawn, graph.edges))
        reached = np.zeros_like(limits)
        np.add.at(reached, sources, drawn)
        new = np.minimum(reached, limits)
        nodes.append(np.minimum(nodes[-1] + new, limits))
        rows.append(np.minimum(edges[-1], nodes[-1][sources]))
    return _shape(schema, nodes, edges[1:], rows)


def moments(counts: Sequence[Sequence[int]]) -> Tensor:
    """Return the sums over sampled batches that :func:`enough_shape` needs. Ranks may add their results.

    Args:
        counts: ``SampledBlock.counts`` of each batch, C numbers each.

    Returns:
        (2 * C + 1,), int64, on the CPU: sums, sums of squares, number of batches.
    """
    each = torch.tensor(counts, dtype=torch.int64)
    return torch.cat([each.sum(0), (each * each).sum(0), torch.tensor([len(each)])])


def enough_shape(moments: Tensor, largest: BlockShape, sigma: float) -> BlockShape:
    """Return capacities of mean + ``sigma`` * standard deviation of every count, at most those of ``largest``.

    Every relation and type that can occur gets a capacity of at least 1. NVIDIA's sigma is 5, with 20 batches on each
    rank (training_results_v5.0, rgat).

    Args:
        moments: sum of :func:`moments` over all batches, (2 * C + 1,).
        largest: upper bounds, from :func:`largest_shape`; the result keeps their number of seeds.
        sigma: factor of the population standard deviation (divided by n, not n - 1).

    Raises:
        ValueError: there is no batch, the blocks have another shape, or a block is incomplete.
    """
    sums, squares, (batches,) = (part.tolist() for part in moments.split([largest.counts, largest.counts, 1]))
    if batches < 1:
        raise ValueError("no batch was sampled")
    if sums[-1]:
        raise ValueError("a sampled batch exceeded its capacity, so its counts are incomplete")
    wanted = [  # Python's integers, because the products may exceed 64 bits
        math.ceil((total + sigma * math.sqrt(batches * square - total * total)) / batches)
        for total, square in zip(sums, squares, strict=True)
    ]
    limits = _tables(largest)
    ends = np.cumsum([table.size for table in limits])
    parts = np.split(np.array(wanted[:-1]), ends[:-1])
    parts[0][: len(largest.schema.types)] = largest.nodes[0]
    nodes, edges, rows = (
        _ascending(part.reshape(limit.shape), limit) for part, limit in zip(parts, limits, strict=True)
    )
    rows = np.minimum(np.minimum(rows, edges), nodes[1:, list(largest.schema.sources)])
    return _shape(largest.schema, nodes, edges, rows)


def at_most(shape: BlockShape, limit: int) -> BlockShape:
    """Return ``shape`` with every capacity except the seeds limited to ``limit``."""
    return _changed(shape, lambda table: np.minimum(table, limit), shape)


def grown(shape: BlockShape, largest: BlockShape, least: int = 1) -> BlockShape:
    """Return ``shape`` with doubled capacities, at least ``least`` and at most those of ``largest``."""
    return _changed(shape, lambda table: np.maximum(2 * table, least), largest)


Table = NDArray[np.int64]


def _changed(shape: BlockShape, change: Callable[[Table], Table], largest: BlockShape) -> BlockShape:
    limits = _tables(largest)
    nodes, edges, rows = (np.minimum(change(table), limit) for table, limit in zip(_tables(shape), limits, strict=True))
    nodes[0] = shape.nodes[0]
    return _shape(shape.schema, _ascending(nodes, limits[0]), edges, rows)


def _ascending(table: Table, limits: Table) -> Table:
    """Return capacities of at least 1 within ``limits``, and not less than those of the hop before."""
    ascending: Table = np.maximum.accumulate(np.minimum(np.maximum(table, 1), limits))
    return ascending


def _tables(shape: BlockShape) -> tuple[Table, Table, Table]:
    return np.array(shape.nodes), np.array(shape.edges), np.array(shape.rows)


def _shape(schema: Schema, *tables: Sequence[Table] | Table) -> BlockShape:
    return BlockShape(schema, *(tuple(tuple(line.tolist()) for line in table) for table in tables))


FIRST_CAPACITY = 64
"""Capacity per seed for nodes, edges and rows of each kind, while nothing is known about the batches."""

LEAST_GROWN = 64
"""Minimum of all capacities in a grown shape, because the measured batches say little about rare types."""


class BuildSampler(Protocol):
    """Function that builds a sampler (:mod:`benchmarks.rgat.ops.sample`)."""

    def __call__(self, graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> NeighborSampler:
        """Return a sampler for a graph, the edges drawn at each hop, and the capacities of a block."""
        ...


@dataclass(frozen=True)
class SeedBatch:
    """Seeds of one block.

    Attributes:
        seeds: int32, [shape.seeds], distinct nodes, on the sampler's device.
        count: number of real seeds, which are the first ones; the rest is padding.
        seed: random seed of all draws, 0-d int64 on the device.
    """

    seeds: Tensor
    count: int
    seed: Tensor


@dataclass(frozen=True)
class _PendingBlock:
    """A block that is being sampled. ``overflow``, its flag, is on the host after the event ``copied``."""

    batch: SeedBatch
    block: SampledBlock
    overflow: Tensor
    copied: torch.cuda.Event | None

    def overflowed(self) -> bool:
        """Wait for the overflow flag, and return whether the block must be sampled again with larger capacities."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(int(self.overflow))


class BlockSampler:
    """Sampler of blocks with one shape, and with larger shapes where a block exceeds it.

    The samplers for ``shape`` and the next larger shape are built at once. Still larger ones, which hardly any block
    needs, are built on demand and kept.

    Args:
        fanouts: edges per relation that a node draws, by hop.
        shape: capacities of the usual block.
        group: ranks that use ``shape`` either all or not at all for a batch; must carry no other traffic at the same
            time. With it, sampling is collective and all ranks need equally many batches. None: this rank decides
            alone.

    Attributes:
        sampled, larger: number of blocks so far, and of those with a larger shape.
    """

    def __init__(
        self,
        graph: Graph,
        fanouts: Sequence[int],
        build: BuildSampler,
        shape: BlockShape,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.shape = shape
        self._group = group
        self.sampled = self.larger = 0
        self._graph, self._fanouts, self._build = graph, tuple(fanouts), build
        self._bounds = largest_shape(graph, shape.seeds, self._fanouts)
        self._shapes, self._samplers = [shape], [build(graph, self._fanouts, shape)]
        if shape != self._bounds:
            self._of_size(1)

    def blocks(self, batches: Iterable[SeedBatch]) -> Iterator[SampledBlock]:
        """Yield the complete block of each batch, while the next one is being sampled."""
        waiting: _PendingBlock | None = None
        for batch in batches:
            following = self._begin(batch)
            if waiting is not None:
                yield self._finish(waiting)
            waiting = following
        if waiting is not None:
            yield self._finish(waiting)

    def _of_size(self, size: int) -> NeighborSampler:
        """Return the sampler for ``shape`` after it has grown ``size`` times."""
        while len(self._samplers) <= size:
            self._shapes.append(grown(self._shapes[-1], self._bounds, LEAST_GROWN))
            self._samplers.append(self._build(self._graph, self._fanouts, self._shapes[-1]))
        return self._samplers[size]

    def _begin(self, batch: SeedBatch, size: int = 0) -> _PendingBlock:
        block = self._of_size(size)(batch.seeds, batch.count, batch.seed)
        overflow = block.overflow
        if self._group is not None and size == 0:
            overflow = overflow.clone()
            dist.all_reduce(overflow, dist.ReduceOp.MAX, self._group)
        if overflow.device.type != "cuda":
            return _PendingBlock(batch, block, overflow, None)
        on_host = torch.empty(overflow.shape, dtype=overflow.dtype, pin_memory=True)
        on_host.copy_(overflow, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _PendingBlock(batch, block, on_host, copied)

    def _finish(self, pending: _PendingBlock) -> SampledBlock:
        size = 0
        while pending.overflowed():
            size += 1
            pending = self._begin(pending.batch, size)
        self.sampled += 1
        self.larger += size > 0
        return pending.block


def sampled_moments(
    graph: Graph, fanouts: Sequence[int], build: BuildSampler, seeds: int, batches: Iterable[SeedBatch]
) -> Tensor:
    """Return :func:`moments` of the blocks of ``batches``, which have ``seeds`` seeds each."""
    bounds = largest_shape(graph, seeds, fanouts)
    sampler = BlockSampler(graph, fanouts, build, at_most(bounds, FIRST_CAPACITY * seeds))
    return moments([block.counts.tolist() for block in sampler.blocks(batches)])
