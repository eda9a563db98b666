"""R-GAT's data: seeds, and blocks with features around them, from the prepared graph and features.

A batch has the tensors of a :class:`benchmarks.rgat.graph.SampledBlock`, whose shape is the batch's key, and
``features`` [nodes, F], ``label`` (B,) int64 (:data:`NO_LABEL` for padding) and ``seed``, 0-d int64, for dropout. While
one batch trains, the features of the next are gathered and a later block is sampled.

A stream consists of one micro-batch of each global batch. Each of the S streams has its own contiguous range of
floor(n / S) training seeds, and visits it in a new order in each epoch, like the ranks of the reference. Remaining
seeds are not trained on; the last micro-batch of an epoch may be short.
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
from torch import Tensor

from benchmarks.rgat.feature_store import E4M3, FeatureStore
from benchmarks.rgat.graph import BlockShape, Graph, SampledBlock, to_device
from benchmarks.rgat.prepared import Labelled
from benchmarks.rgat.sampling import BlockSampler, BuildSampler, SeedBatch, enough_shape, largest_shape, sampled_moments
from common.data.batches import Block, HostBatch
from common.data.order import EvalShard, MicroBatches, sample_generator
from common.errors import ConfigError

NO_LABEL = -1
"""Label of a padding seed."""

_ORDER, _EVALUATION, _CAPACITY = 11, 12, 13  # purposes of random numbers


class TrainingSeeds:
    """Training seeds of one replica's micro-batches.

    Args:
        seed: random seed of the orders.

    Raises:
        ConfigError: a stream has fewer seeds than a micro-batch.
    """

    def __init__(self, labelled: Labelled, micro_batches: MicroBatches, seed: int, device: torch.device) -> None:
        self.labelled, self.micro_batches, self.seed, self.device = labelled, micro_batches, seed, device
        self._orders: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        if self.stream_seeds < micro_batches.micro_batch:
            raise ConfigError(
                f"micro_batch={micro_batches.micro_batch}: {len(labelled)} training seeds over {micro_batches.streams} "
                f"micro-batches of a global batch are only {self.stream_seeds} for each"
            )

    @property
    def stream_seeds(self) -> int:
        """Seeds per stream and epoch."""
        return len(self.labelled) // self.micro_batches.streams

    @property
    def steps_of_epoch(self) -> int:
        """Global batches per epoch."""
        return -(-self.stream_seeds // self.micro_batches.micro_batch)

    def batches(self, block: Block, start: int = 0) -> Iterator[tuple[SeedBatch, Tensor]]:
        """Yield this replica's micro-batches of ``block`` from position ``start``: seeds, and labels [B], int64."""
        first = self.micro_batches.first(block)
        for position in range(start, self.micro_batches.count(block)):
            yield self.batch(first + position)

    def batch(self, number: int) -> tuple[SeedBatch, Tensor]:
        """Return seeds and labels of this replica's micro-batch ``number`` of the training, padded if they run out."""
        step, accumulation_step = self.micro_batches.step_of(number)
        epoch, index = divmod(step, self.steps_of_epoch)
        nodes, labels = self._epoch(self.micro_batches.stream(accumulation_step), epoch)
        begin = index * self.micro_batches.micro_batch
        return padded(
            nodes, labels, begin, self.micro_batches.micro_batch, self.micro_batches.random_seed(self.seed, number)
        )

    def capacity_batches(self, batches: int) -> Iterator[SeedBatch]:
        """Yield batches for estimating capacities: those of the first stream's first epoch, sampled differently."""
        stream, size = self.micro_batches.stream(0), self.micro_batches.micro_batch
        nodes, labels = self._epoch(stream, 0)
        for index in range(batches):
            begin = index % (self.stream_seeds // size) * size
            random_seed = int(sample_generator(self.seed, _CAPACITY, stream, index).integers(2**63))
            yield padded(nodes, labels, begin, size, random_seed)[0]

    def _epoch(self, stream: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Return seeds and labels of a stream in the order of an epoch, on the device."""
        if (stream, epoch) not in self._orders:
            for other in [key for key in self._orders if key[1] != epoch]:
                for tensor in self._orders.pop(other):
                    if tensor.is_cuda:  # created on another stream, and perhaps still to be read by this one
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
            order = sample_generator(self.seed, _ORDER, epoch, stream).permutation(self.stream_seeds)
            part = slice(stream * self.stream_seeds, (stream + 1) * self.stream_seeds)
            arrays = (np.asarray(each[part])[order] for each in (self.labelled.nodes, self.labelled.labels))
            nodes, labels = (to_device(torch.from_numpy(array), self.device) for array in arrays)
            self._orders[stream, epoch] = nodes, labels
        return self._orders[stream, epoch]


@dataclass(frozen=True)
class EvaluationSeeds:
    """Evaluation seeds of one rank, in batches of one size: the parts rank, rank + ranks, and so on.

    The random draws depend only on part and batch, so the result is the same for every number of ranks.

    Attributes:
        batch: seeds per batch.
        parts: number of contiguous parts of the seeds; a multiple of ``ranks``.
        ranks, rank: number of ranks that share the parts, and index of this rank.
        seed: random seed; the same in every evaluation.
    """

    labelled: Labelled
    batch: int
    parts: int
    ranks: int
    rank: int
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.parts % self.ranks:
            raise ConfigError(
                f"evaluation ranks: {self.ranks} do not divide the {self.parts} parts in which seeds are evaluated, "
                "the micro-batches of a global batch"
            )

    def batches(self) -> Iterator[tuple[SeedBatch, Tensor]]:
        """Yield seeds and labels [B], int64, of each batch. Every rank has the same number of batches."""
        nodes, labels = self._all
        for part in range(self.rank, self.parts, self.ranks):
            shard = EvalShard(len(self.labelled), self.batch, self.parts, part)
            for index in range(shard.batches):
                random_seed = int(sample_generator(self.seed, _EVALUATION, part, index).integers(2**63))
                begin = shard.start + index * self.batch
                yield padded(nodes, labels, begin, self.batch, random_seed, shard.valid(index))

    def capacity_batches(self, batches: int) -> Iterator[SeedBatch]:
        """Yield batches for estimating capacities."""
        nodes, labels = self._all
        for index in range(batches):
            begin = (self.rank * batches + index) * self.batch % max(1, len(nodes) - self.batch + 1)
            random_seed = int(sample_generator(self.seed, _CAPACITY, self.rank, index, 1).integers(2**63))
            yield padded(nodes, labels, begin, self.batch, random_seed)[0]

    @functools.cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        """All seeds and labels on the device: 5 MB for the real set."""
        arrays = (np.array(each) for each in (self.labelled.nodes, self.labelled.labels))
        nodes, labels = (to_device(torch.from_numpy(array), self.device) for array in arrays)
        return nodes, labels


def padded(
    nodes: Tensor, labels: Tensor, begin: int, size: int, random_seed: int, count: int | None = None
) -> tuple[SeedBatch, Tensor]:
    """Return seeds and int64 labels from index ``begin``, padded to ``size`` by node 0 and ``NO_LABEL``.

    Args:
        nodes, labels: (n,) int32 and (n,) int16, on the device.
        random_seed: seed of sampling and dropout.
        count: number of real seeds; None: as many as remain, up to ``size``.
    """
    count = min(size, len(nodes) - begin) if count is None else count
    seeds = nodes[begin : begin + count]
    label = labels[begin : begin + count].to(torch.int64)
    if count < size:
        seeds = torch.cat([seeds, seeds.new_zeros(size - count)])
        label = torch.cat([label, label.new_full((size - count,), NO_LABEL)])
    return SeedBatch(seeds, count, to_device(torch.tensor(random_seed), nodes.device)), label


@dataclass(frozen=True)
class GraphData:
    """Graph, features and settings from which blocks are sampled.

    Attributes:
        fanouts: edges per relation that a node draws, by hop.
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
            seeds: seeds per batch.
            batches: batches of this rank.
            sigma: standard deviations above the mean; see :func:`benchmarks.rgat.sampling.enough_shape`.
            group: ranks whose batches count as well; None for this rank alone.
        """
        moments = sampled_moments(self.graph, self.fanouts, self.build, seeds, batches).to(self.graph.device)
        if group is not None:
            dist.all_reduce(moments, group=group)
        return enough_shape(moments.cpu(), largest_shape(self.graph, seeds, self.fanouts), sigma)

    def sampler(self, shape: BlockShape, group: dist.ProcessGroup | None = None) -> BlockSampler:
        """Return a sampler for ``shape``; the ranks of ``group`` leave this shape together."""
        return BlockSampler(self.graph, self.fanouts, self.build, shape, group)

    def example(self, shape: BlockShape, batch: tuple[SeedBatch, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a batch for warm-up, truncated where ``shape`` is too small."""
        seeds, label = batch
        block = self.build(self.graph, self.fanouts, shape)(seeds.seeds, seeds.count, seeds.seed)
        return self._with_features(block, self.features.plan(block), seeds, label)

    def tensors(
        self, sampler: BlockSampler, batches: Iterable[tuple[SeedBatch, Tensor]]
    ) -> Iterator[tuple[BlockShape, dict[str, Tensor]]]:
        """Yield shape and tensors of each batch (block, ``features``, ``label``, ``seed``), on the current stream."""
        pending: deque[tuple[SeedBatch, Tensor]] = deque()
        planned: tuple[SampledBlock, Any] | None = None

        def seed_batches() -> Iterator[SeedBatch]:
            for batch, label in batches:
                pending.append((batch, label))
                yield batch

        for block in sampler.blocks(seed_batches()):
            # A plan is used one block later, when its copies to the host are complete, so that nothing waits for them.
            plan = self.features.plan(block)
            if planned is not None:
                yield planned[0].shape, self._with_features(*planned, *pending.popleft())
            planned = (block, plan)
        if planned is not None:
            yield planned[0].shape, self._with_features(*planned, *pending.popleft())

    def _with_features(self, block: SampledBlock, plan: Any, batch: SeedBatch, label: Tensor) -> dict[str, Tensor]:
        rows = block.shape.node_offsets(block.shape.hops)[-1]
        features_NF = torch.empty((rows, self.features.width), dtype=E4M3, device=self.graph.device)
        self.features.gather(block, plan, features_NF)
        return {**block.tensors(), "features": features_NF, "label": label, "seed": batch.seed}


class BlockSource:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    Args:
        shape: capacities of nearly every block.
        group: communicator of the ranks that train together, separate from the one for gradients; None for one rank.
    """

    def __init__(
        self,
        sources: GraphData,
        seeds: TrainingSeeds,
        shape: BlockShape,
        eval_samples: int,
        synthetic: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.train_samples = len(seeds.labelled)
        self.eval_samples = eval_samples
        self.synthetic = synthetic
        self.shape = shape
        self.sampler = sources.sampler(shape, group)
        self._sources, self._seeds = sources, seeds

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``."""
        part = self._seeds.micro_batches
        sampled = self._sources.tensors(self.sampler, self._seeds.batches(block, start))
        for position, (shape, tensors) in enumerate(sampled, start):
            yield HostBatch(tensors, part.micro_batch * part.replicas, position, shape)

    def close(self) -> None:
        """Do nothing: the workload releases the sources."""
