"""Sampling of blocks one batch ahead, and resampling of blocks that exceed their capacities.

Counts stay on the device. The overflow flag of each block is copied to pinned memory, and read after the next block
has been queued. A block that overflows is sampled again with larger capacities. The result is the same block, because
every random draw is a function of seed, relation, node and slot.

Whether collectives are captured must be the same on all participating ranks (NCCL user guide, "Using NCCL with CUDA
Graphs"). In a step with collectives, all ranks therefore leave the captured shape as soon as one of them must.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.capacities import at_most, grown, largest_shape, moments
from benchmarks.rgat.graph import Graph
from benchmarks.rgat.ops.sample.sampler import Sampler

FIRST_ROOM = 64
"""Capacity per seed for nodes, edges and rows of each kind, while nothing is known about the batches."""

LEAST_GROWN = 64
"""Minimum of all capacities in a grown shape, because the measured batches say little about rare types."""


class BuildSampler(Protocol):
    """Function that builds a sampler (:mod:`benchmarks.rgat.ops.sample`)."""

    def __call__(self, graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> Sampler:
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
class _Begun:
    """A block that is being sampled. ``lacking``, its overflow flag, is on the host after ``copied``."""

    batch: SeedBatch
    block: Block
    lacking: Tensor
    copied: torch.cuda.Event | None

    def lacks(self) -> bool:
        """Wait for the overflow flag, and return whether the block must be sampled again with larger capacities."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(int(self.lacking))


class BlockSampler:
    """Sampler of blocks with one shape, and with larger shapes where a block exceeds it.

    The samplers for ``shape`` and the next larger shape are built at once. Still larger ones, which hardly any block
    needs, are built on demand and kept.

    Args:
        fanouts: edges per relation that a node draws, by hop.
        build: builds a sampler.
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

    def blocks(self, batches: Iterable[SeedBatch]) -> Iterator[Block]:
        """Yield the complete block of each batch, while the next one is being sampled."""
        waiting: _Begun | None = None
        for batch in batches:
            following = self._begin(batch)
            if waiting is not None:
                yield self._finish(waiting)
            waiting = following
        if waiting is not None:
            yield self._finish(waiting)

    def _of_size(self, size: int) -> Sampler:
        """Return the sampler for ``shape`` after it has grown ``size`` times."""
        while len(self._samplers) <= size:
            self._shapes.append(grown(self._shapes[-1], self._bounds, LEAST_GROWN))
            self._samplers.append(self._build(self._graph, self._fanouts, self._shapes[-1]))
        return self._samplers[size]

    def _begin(self, batch: SeedBatch, size: int = 0) -> _Begun:
        block = self._of_size(size)(batch.seeds, batch.count, batch.seed)
        lacking = block.overflow
        if self._group is not None and size == 0:
            lacking = lacking.clone()
            dist.all_reduce(lacking, dist.ReduceOp.MAX, self._group)
        if lacking.device.type != "cuda":
            return _Begun(batch, block, lacking, None)
        on_host = torch.empty(lacking.shape, dtype=lacking.dtype, pin_memory=True)
        on_host.copy_(lacking, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _Begun(batch, block, on_host, copied)

    def _finish(self, begun: _Begun) -> Block:
        size = 0
        while begun.lacks():
            size += 1
            begun = self._begin(begun.batch, size)
        self.sampled += 1
        self.larger += size > 0
        return begun.block


def measured(
    graph: Graph, fanouts: Sequence[int], build: BuildSampler, seeds: int, batches: Iterable[SeedBatch]
) -> Tensor:
    """Return :func:`benchmarks.rgat.capacities.moments` of the blocks of some batches.

    Args:
        graph, fanouts, build: see :class:`BlockSampler`.
        seeds: seeds per batch.
    """
    bounds = largest_shape(graph, seeds, fanouts)
    sampler = BlockSampler(graph, fanouts, build, at_most(bounds, FIRST_ROOM * seeds))
    return moments([block.counts.tolist() for block in sampler.blocks(batches)])
