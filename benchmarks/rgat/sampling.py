"""Blocks sampled from a graph: how much room they need, and one ahead of when they are wanted.

Counts stay on the device; a copy of what tells that room was lacking follows each block to pinned memory and is read
when the next one has been queued. A block that lacks something is sampled again with more room: it is the same block,
since what is drawn is a function of seed, relation, node and slot.

Whether collectives are captured must be the same on all ranks that take part (NCCL user guide, "Using NCCL with CUDA
Graphs"). So where a step has some, all its ranks leave the shape that is captured as soon as one of them must.
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
"""Nodes, edges and rows of each kind for every seed, before anything is known."""

LEAST_GROWN = 64
"""Nodes, edges and rows of each kind in a larger block: the batches that are measured tell little of what is rare."""


class BuildSampler(Protocol):
    """Makes a sampler (:mod:`benchmarks.rgat.ops.sample`)."""

    def __call__(self, graph: Graph, fanouts: Sequence[int], shape: BlockShape) -> Sampler:
        """One for a graph, edges drawn at each hop, and the room of a block."""
        ...


@dataclass(frozen=True)
class SeedBatch:
    """What a block is sampled around.

    Attributes:
        seeds: int32, [shape.seeds], distinct nodes, on the sampler's device.
        count: so many of them are real, the first ones.
        seed: 0-d int64 on the device: of all that is drawn.
    """

    seeds: Tensor
    count: int
    seed: Tensor


@dataclass(frozen=True)
class _Begun:
    """A block that is being sampled; ``lacking`` is on the host once ``copied``."""

    batch: SeedBatch
    block: Block
    lacking: Tensor
    copied: torch.cuda.Event | None

    def lacks(self) -> bool:
        """Whether it has to be sampled with more room; waits until that is known."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(int(self.lacking))


class BlockSampler:
    """Samples blocks of a shape, and larger ones where that is too small.

    What samples with the usual room, and with that of the next larger shape, is made at once; more than that, which
    hardly any block needs, is made when it is wanted, and kept.

    Args:
        graph: sampled from.
        fanouts: edges of each relation that a node draws, by hop.
        build: makes a sampler.
        shape: of the usual block.
        group: the ranks whose blocks have the shape together, or none of them; nothing else is sent in it at the same
            time. None: this rank decides alone. With it, sampling is collective: as many batches on all ranks.

    Attributes:
        sampled, larger: blocks so far, and those of them that have not the shape.
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
        """Yield the block of each batch; that of the next one is sampled meanwhile. None lacks anything."""
        waiting: _Begun | None = None
        for batch in batches:
            following = self._begin(batch)
            if waiting is not None:
                yield self._finish(waiting)
            waiting = following
        if waiting is not None:
            yield self._finish(waiting)

    def _of_size(self, size: int) -> Sampler:
        """Samples blocks of the usual shape, 0, or of one that has grown so many times."""
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
    """What the blocks of some batches fill: :func:`benchmarks.rgat.capacities.moments` of them.

    Args:
        graph, fanouts, build: see :class:`BlockSampler`.
        seeds: of a batch.
        batches: to sample.
    """
    bounds = largest_shape(graph, seeds, fanouts)
    sampler = BlockSampler(graph, fanouts, build, at_most(bounds, FIRST_ROOM * seeds))
    return moments([block.counts.tolist() for block in sampler.blocks(batches)])
