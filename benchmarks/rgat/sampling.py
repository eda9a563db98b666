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

FIRST_ROOM = 64
"""Nodes, edges and rows of each kind for every seed, before anything is known."""


class Sampler(Protocol):
    """Samples blocks of one shape (:mod:`benchmarks.rgat.ops.sample`)."""

    def __call__(self, seeds: Tensor, count: Tensor | int, seed: Tensor) -> Block:
        """The block around the first ``count`` of ``seeds``."""
        ...


class BuildSampler(Protocol):
    """Makes a sampler."""

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
    batch: SeedBatch
    block: Block
    lacking: Tensor
    copied: torch.cuda.Event | None


class BlockSampler:
    """Samples blocks of a shape, and larger ones where that is too small.

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
        self._sampler = build(graph, self._fanouts, shape)

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

    def _begin(self, batch: SeedBatch) -> _Begun:
        block = self._sampler(batch.seeds, batch.count, batch.seed)
        lacking = block.overflow
        if self._group is not None:
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
        if begun.copied is not None:
            begun.copied.synchronize()
        self.sampled += 1
        if not int(begun.lacking):
            return begun.block
        self.larger += 1
        batch, shape = begun.batch, self.shape
        while True:
            shape = grown(shape, self._bounds)
            block = self._build(self._graph, self._fanouts, shape)(batch.seeds, batch.count, batch.seed)
            if not int(block.overflow):
                return block


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
