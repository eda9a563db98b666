"""R-GAT's data: seeds, and blocks with features around them, from the prepared graph and features.

A batch has the tensors of a :class:`benchmarks.rgat.graph.SampledBlock`, whose shape is the batch's key, and
``features`` [nodes, F], ``label`` (B,) int64 (:data:`NO_LABEL` for padding) and ``seed``, 0-d int64, for dropout. While
one batch trains, the features of the next are gathered and a later block is sampled.

A lane is one stream of micro-batches: one micro-batch of each global batch. Every lane has its own contiguous range
of floor(n / lanes) training seeds, and visits it in a new order in each epoch, like the ranks of the reference.
Remaining seeds are not trained on; the last micro-batch of an epoch may be short.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rgat.feature_store import E4M3, FeatureStore
from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock, to_device
from benchmarks.rgat.sampling import BlockSampler, BuildSampler, SeedBatch, enough_shape, largest_shape, measured
from common.data.batches import Block, HostBatch
from common.data.order import EvalShard, MicroBatches, sample_generator
from common.errors import ConfigError

NO_LABEL = -1
"""Label of a padding seed."""

_ORDER, _EVALUATION, _MEASURING = 11, 12, 13
"""Purposes of random numbers."""


@dataclass(frozen=True)
class Labelled:
    """Nodes and their classes.

    Attributes:
        nodes: int32, (n,).
        labels: int16, (n,).
    """

    nodes: NDArray[np.int32]
    labels: NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.nodes)


class SeedStream:
    """Seeds of one replica's micro-batches.

    Args:
        labelled: all training seeds.
        mine: this replica's part of every global batch.
        seed: random seed of the orders.
        device: device of the batches.

    Raises:
        ConfigError: a lane has fewer seeds than a micro-batch.
    """

    def __init__(self, labelled: Labelled, mine: MicroBatches, seed: int, device: torch.device) -> None:
        self.labelled, self.mine, self.seed, self.device = labelled, mine, seed, device
        self._orders: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        if self.lane_seeds < self.mine.micro_batch:
            raise ConfigError(
                f"micro_batch={self.mine.micro_batch}: {len(self.labelled)} training seeds over {self.mine.streams} "
                f"micro-batches of a global batch are only {self.lane_seeds} for each"
            )

    @property
    def lane_seeds(self) -> int:
        """Seeds per lane and epoch."""
        return len(self.labelled) // self.mine.streams

    @property
    def steps_of_epoch(self) -> int:
        """Global batches per epoch."""
        return -(-self.lane_seeds // self.mine.micro_batch)

    def batches(self, block: Block, start: int = 0) -> Iterator[tuple[SeedBatch, Tensor]]:
        """Yield this replica's micro-batches of ``block`` from position ``start``: seeds, and labels [B], int64."""
        first = self.mine.first(block)
        for position in range(start, self.mine.count(block)):
            yield self.batch(first + position)

    def batch(self, number: int) -> tuple[SeedBatch, Tensor]:
        """Return this replica's micro-batch ``number``, counted from the start of training."""
        step, accumulation_step = self.mine.step_of(number)
        epoch, index = divmod(step, self.steps_of_epoch)
        nodes, labels = self._epoch(self.mine.stream(accumulation_step), epoch)
        begin = index * self.mine.micro_batch
        return padded(nodes, labels, begin, self.mine.micro_batch, self.mine.random_seed(self.seed, number))

    def measuring(self, batches: int) -> Iterator[SeedBatch]:
        """Yield batches for estimating capacities: those of the first lane's first epoch, with other random draws."""
        nodes, labels = self._epoch(self.mine.stream(0), 0)
        for index in range(batches):
            begin = index % (self.lane_seeds // self.mine.micro_batch) * self.mine.micro_batch
            drawn = int(sample_generator(self.seed, _MEASURING, self.mine.stream(0), index).integers(2**63))
            yield padded(nodes, labels, begin, self.mine.micro_batch, drawn)[0]

    def _epoch(self, lane: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Return seeds and labels of a lane in the order of an epoch, on the device."""
        if (lane, epoch) not in self._orders:
            for other in [key for key in self._orders if key[1] != epoch]:
                for tensor in self._orders.pop(other):
                    if tensor.is_cuda:  # created on another stream, and perhaps still to be read by this one
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self._orders[lane, epoch] = self._drawn(lane, epoch)
        return self._orders[lane, epoch]

    def _drawn(self, lane: int, epoch: int) -> tuple[Tensor, Tensor]:
        order = sample_generator(self.seed, _ORDER, epoch, lane).permutation(self.lane_seeds)
        part = slice(lane * self.lane_seeds, (lane + 1) * self.lane_seeds)
        arrays = (np.asarray(each[part])[order] for each in (self.labelled.nodes, self.labelled.labels))
        nodes, labels = (to_device(torch.from_numpy(array), self.device) for array in arrays)
        return nodes, labels


@dataclass(frozen=True)
class EvaluationSeeds:
    """Evaluation seeds of one rank, in batches of one size: the lanes rank, rank + ranks, and so on.

    The random draws depend only on lane and batch, so the result is the same for every number of ranks.

    Attributes:
        labelled: all evaluation seeds.
        batch: seeds per batch.
        lanes: number of contiguous parts of the seeds; a multiple of ``ranks``.
        ranks, rank: number of ranks that share the lanes, and index of this rank.
        seed: random seed; the same in every evaluation.
        device: device of the batches.
    """

    labelled: Labelled
    batch: int
    lanes: int
    ranks: int
    rank: int
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.lanes % self.ranks:
            raise ConfigError(
                f"evaluation ranks: {self.ranks} do not divide the {self.lanes} parts in which seeds are evaluated, "
                "the micro-batches of a global batch"
            )

    def batches(self) -> Iterator[tuple[SeedBatch, Tensor]]:
        """Yield seeds and labels [B], int64, of each batch. Every rank has the same number of batches."""
        nodes, labels = self._all
        for lane in range(self.rank, self.lanes, self.ranks):
            shard = EvalShard(len(self.labelled), self.batch, self.lanes, lane)
            for index in range(shard.batches):
                drawn = int(sample_generator(self.seed, _EVALUATION, lane, index).integers(2**63))
                begin = shard.start + index * self.batch
                yield padded(nodes, labels, begin, self.batch, drawn, shard.valid(index))

    def measuring(self, batches: int) -> Iterator[SeedBatch]:
        """Yield batches for estimating capacities."""
        nodes, labels = self._all
        for index in range(batches):
            begin = (self.rank * batches + index) * self.batch % max(1, len(nodes) - self.batch + 1)
            drawn = int(sample_generator(self.seed, _MEASURING, self.rank, index, 1).integers(2**63))
            yield padded(nodes, labels, begin, self.batch, drawn)[0]

    @functools.cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        """All seeds and labels on the device: 5 MB for the real set."""
        arrays = (np.array(each) for each in (self.labelled.nodes, self.labelled.labels))
        nodes, labels = (to_device(torch.from_numpy(array), self.device) for array in arrays)
        return nodes, labels


def padded(
    nodes: Tensor, labels: Tensor, begin: int, size: int, drawn: int, count: int | None = None
) -> tuple[SeedBatch, Tensor]:
    """Return seeds and labels from index ``begin``, padded to ``size``.

    Args:
        nodes, labels: int32 and int16, on the device.
        size: size of the batch.
        drawn: random seed for sampling and dropout.
        count: number of real seeds; None: as many as there are, up to ``size``.
    """
    count = min(size, len(nodes) - begin) if count is None else count
    seeds = nodes[begin : begin + count]
    label = labels[begin : begin + count].to(torch.int64)
    if count < size:
        seeds = torch.cat([seeds, seeds.new_zeros(size - count)])
        label = torch.cat([label, label.new_full((size - count,), NO_LABEL)])
    return SeedBatch(seeds, count, to_device(torch.tensor(drawn), nodes.device)), label


@dataclass(frozen=True)
class GraphData:
    """Graph, features and settings from which blocks are sampled.

    Attributes:
        fanouts: edges per relation that a node draws, by hop.
        build: builds a sampler.
    """

    graph: Graph
    features: FeatureStore
    fanouts: tuple[int, ...]
    build: BuildSampler

    def capacities(
        self, seeds: int, batches: Iterable[SeedBatch], sigma: float, group: dist.ProcessGroup | None
    ) -> BlockShape:
        """Return capacities for nearly every block, estimated from sampled batches. Collective over ``group``.

        Args:
            seeds: seeds of a batch.
            batches: batches of this rank.
            sigma: see :func:`benchmarks.rgat.sampling.enough_shape`.
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
        planned: tuple[SampledBlock, Any] | None = None

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

    def _with_features(self, block: SampledBlock, plan: Any, batch: SeedBatch, label: Tensor) -> dict[str, Tensor]:
        rows = block.shape.node_offsets(block.shape.hops)[-1]
        features_NF = torch.empty((rows, self.features.width), dtype=E4M3, device=self.graph.device)
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
        sources: GraphData,
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

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``."""
        mine = self._stream.mine
        made = self._sources.tensors(self.sampler, self._stream.batches(block, start))
        for position, (shape, tensors) in enumerate(made, start):
            yield HostBatch(tensors, mine.micro_batch * mine.replicas, position, shape)

    def close(self) -> None:
        """Do nothing: the workload releases the sources."""
