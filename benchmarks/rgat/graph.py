"""A graph in memory: for every relation, the sources of each target's edges (compressed columns), in shards.

A shard is a run of targets and lies wherever its tensors do: in this GPU's memory, in that of another GPU of the node,
which this one has mapped, or in pinned memory of the host. Kernels read all of them in place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rgat.device_tables import device_table
from benchmarks.rgat.schema import Schema

LARGEST = (1 << 31) - 1
"""Nodes of a type are numbered in int32."""


@dataclass(frozen=True)
class Graph:
    """All relations of a graph. R relations, S shards.

    Attributes:
        schema: its types and relations.
        nodes: of each type.
        indptr: [R][S], int64, [targets_per_shard[r] + 1]: where each target's edges begin in the shard's ``indices``;
            targets beyond the last of the type have none.
        indices: [R][S], int32: the edges' sources.
        device: of what samples from it.
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
        """S."""
        return len(self.indptr[0])

    @functools.cached_property
    def targets_per_shard(self) -> tuple[int, ...]:
        """Targets of each shard, by relation: target i lies in shard i // so many."""
        return tuple(len(shards[0]) - 1 for shards in self.indptr)

    @functools.cached_property
    def edges(self) -> tuple[int, ...]:
        """Of each relation."""
        return tuple(sum(len(shard) for shard in shards) for shards in self.indices)

    @functools.cached_property
    def stamps(self) -> Tensor:
        """[all nodes], int32, on ``device``: what samplers mark nodes in, one block after the other; all unseen."""
        return torch.full((sum(self.nodes),), LARGEST, dtype=torch.int32, device=self.device)

    @functools.cached_property
    def pointers(self) -> Tensor:
        """[2, R, S], int64, on ``device``: addresses of all ``indptr``, then of all ``indices``, for kernels."""
        tables = [[[shard.data_ptr() for shard in shards] for shards in which] for which in (self.indptr, self.indices)]
        return device_table(tables, torch.int64, self.device)
