"""Graph in memory: for every relation, the sources of each target's edges (CSC), in shards.

A shard is a range of targets. Its tensors may be in the memory of this GPU, in mapped memory of another GPU of the
node, or in pinned host memory. Kernels read all of them in place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rgat.device_tables import device_table
from benchmarks.rgat.schema import Schema

LARGEST = (1 << 31) - 1
"""Maximum number of nodes of a type, because they are numbered in int32."""


@dataclass(frozen=True)
class Graph:
    """All relations of a graph. R relations, S shards.

    Attributes:
        nodes: number of nodes of each type.
        indptr: [R][S], int64, [targets_per_shard[r] + 1]: first edge of each target in the shard's ``indices``.
            Targets beyond the last node of the type have no edges.
        indices: [R][S], int32: sources of the edges.
        device: device that samples from the graph.
    """

    schema: Schema
    nodes: tuple[int, ...]
    indptr: tuple[tuple[Tensor, ...], ...]
    indices: tuple[tuple[Tensor, ...], ...]
    device: torch.device

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.schema.types) or not all(0 < count <= LARGEST for count in self.nodes):
            raise ValueError(f"nodes={self.nodes}: a number for each of {', '.join(self.schema.types)}, 1 to 2^31 - 1")
        if not len(self.indptr) == len(self.indices) == len(self.schema.relations):
            raise ValueError(
                f"{len(self.indptr)} and {len(self.indices)} tables, {len(self.schema.relations)} relations"
            )
        if len({len(shards) for shards in (*self.indptr, *self.indices)}) != 1:
            raise ValueError("every relation has as many shards as the others")

    @property
    def shards(self) -> int:
        """S, the number of shards."""
        return len(self.indptr[0])

    @functools.cached_property
    def targets_per_shard(self) -> tuple[int, ...]:
        """Targets per shard, by relation: target i is in shard i // targets_per_shard[r]."""
        return tuple(len(shards[0]) - 1 for shards in self.indptr)

    @functools.cached_property
    def edges(self) -> tuple[int, ...]:
        """Number of edges of each relation."""
        return tuple(sum(len(shard) for shard in shards) for shards in self.indices)

    @functools.cached_property
    def stamps(self) -> Tensor:
        """[all nodes], int32, on ``device``: scratch in which samplers mark nodes, one block at a time; all unseen."""
        return torch.full((sum(self.nodes),), LARGEST, dtype=torch.int32, device=self.device)

    @functools.cached_property
    def pointers(self) -> Tensor:
        """[2, R, S], int64, on ``device``: addresses of all ``indptr``, then of all ``indices``, for kernels."""
        tables = [[[shard.data_ptr() for shard in shards] for shards in which] for which in (self.indptr, self.indices)]
        return device_table(tables, torch.int64, self.device)
