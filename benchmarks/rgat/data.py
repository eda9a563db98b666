"""R-GAT's data: blocks with features, sampled on the device from the prepared graph, features and seeds.

A batch has the tensors of a :class:`benchmarks.rgat.block.Block`, whose shape is the batch's key, and ``features``
[nodes, F], ``label`` (B,) int64 (:data:`benchmarks.rgat.seeds.NO_LABEL` for padding) and ``seed``, 0-d int64, for
dropout. While one batch trains, the features of the next are gathered and a later block is sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.capacities import enough_shape, largest_shape
from benchmarks.rgat.graph import Graph
from benchmarks.rgat.sampling import BlockSampler, BuildSampler, SeedBatch, measured
from benchmarks.rgat.seeds import SeedStream
from benchmarks.rgat.stores.features import FeatureStore
from common.data.batches import Block as Between
from common.data.batches import HostBatch


@dataclass(frozen=True)
class Sources:
    """Graph, features and settings from which blocks are sampled.

    Attributes:
        fanouts: edges per relation that a node draws, by hop.
        build: builds a sampler.
    """

    graph: Graph
    features: FeatureStore
    fanouts: tuple[int, ...]
    build: BuildSampler

    def room(
        self, seeds: int, batches: Iterable[SeedBatch], sigma: float, group: dist.ProcessGroup | None
    ) -> BlockShape:
        """Return capacities for nearly every block, estimated from sampled batches. Collective over ``group``.

        Args:
            seeds: seeds of a batch.
            batches: batches of this rank.
            sigma: see :func:`benchmarks.rgat.capacities.enough_shape`.
            group: ranks whose batches count as well; None for this rank alone.
        """
        found = measured(self.graph, self.fanouts, self.build, seeds, batches).to(self.graph.device)
        if group is not None:
            dist.all_reduce(found, group=group)
        return enough_shape(found.cpu(), largest_shape(self.graph, seeds, self.fanouts), sigma)

    def sampler(self, shape: BlockShape, group: dist.ProcessGroup | None = None) -> BlockSampler:
        """Return a sampler for ``shape``; for ``group`` see :class:`benchmarks.rgat.sampling.BlockSampler`."""
        return BlockSampler(self.graph, self.fanouts, self.build, shape, group)

    def example(self, shape: BlockShape, batch: tuple[SeedBatch, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a batch for warm-up, truncated where ``shape`` is too small."""
        seeds, label = batch
        block = self.build(self.graph, self.fanouts, shape)(seeds.seeds, seeds.count, seeds.seed)
        return self._with_features(block, self.features.plan(block), seeds, label)

    def tensors(
        self, sampler: BlockSampler, batches: Iterable[tuple[SeedBatch, Tensor]]
    ) -> Iterator[tuple[BlockShape, dict[str, Tensor]]]:
        """Yield the shape and tensors of each batch; all work is queued on the current stream."""
        under_way: deque[tuple[SeedBatch, Tensor]] = deque()
        planned: tuple[Block, Any] | None = None

        def begun() -> Iterator[SeedBatch]:
            for batch, label in batches:
                under_way.append((batch, label))
                yield batch

        for block in sampler.blocks(begun()):
            # A plan is used one block later, when its copies to the host are complete, so that nothing waits for them.
            plan = self.features.plan(block)
            if planned is not None:
                yield planned[0].shape, self._with_features(*planned, *under_way.popleft())
            planned = (block, plan)
        if planned is not None:
            yield planned[0].shape, self._with_features(*planned, *under_way.popleft())

    def _with_features(self, block: Block, plan: Any, batch: SeedBatch, label: Tensor) -> dict[str, Tensor]:
        rows = block.shape.node_offsets(block.shape.hops)[-1]
        features_NF = torch.empty((rows, self.features.width), dtype=self.features.dtype, device=self.graph.device)
        self.features.gather(block, plan, features_NF)
        return {**block.tensors(), "features": features_NF, "label": label, "seed": batch.seed}


class BlockSource:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    Args:
        shape: capacities of nearly every block.
        eval_samples: number of evaluation seeds.
        stand_in: whether the data are synthetic.
        group: communicator of the ranks that train together, separate from the one for gradients; None for one rank.
    """

    def __init__(
        self,
        sources: Sources,
        stream: SeedStream,
        shape: BlockShape,
        eval_samples: int,
        stand_in: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.train_samples = len(stream.labelled)
        self.eval_samples = eval_samples
        self.stand_in = stand_in
        self.shape = shape
        self.sampler = sources.sampler(shape, group)
        self._sources, self._stream = sources, stream

    def batches(self, block: Between, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``."""
        mine = self._stream.mine
        made = self._sources.tensors(self.sampler, self._stream.batches(block, start))
        for position, (shape, tensors) in enumerate(made, start):
            yield HostBatch(tensors, mine.micro_batch * mine.replicas, position, shape)

    def close(self) -> None:
        """Do nothing: the workload releases the sources."""
