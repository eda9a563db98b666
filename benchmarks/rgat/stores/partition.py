"""Partition of each type's rows into contiguous shards, in the order of the ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Partition:
    """Shards of all types' nodes. Shard s has nodes s * C to (s + 1) * C of each type, with C = ceil(nodes / shards).

    In a shard, types follow one another. All shards have the same size, so the last shards of a type may be partly or
    completely unfilled.

    Attributes:
        nodes: number of nodes of each type.
        shards: S.
    """

    nodes: tuple[int, ...]
    shards: int

    def __post_init__(self) -> None:
        if self.shards < 1 or not self.nodes or min(self.nodes) < 0:
            raise ValueError(f"nodes {self.nodes} cannot be shared among {self.shards}")

    @functools.cached_property
    def rows_per_shard(self) -> tuple[int, ...]:
        """C of each type."""
        return tuple(max(1, -(-count // self.shards)) for count in self.nodes)

    @functools.cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Offset of each type in a shard."""
        return tuple(accumulate(self.rows_per_shard, initial=0))[:-1]

    @property
    def rows(self) -> int:
        """Rows of a shard, all types together."""
        return sum(self.rows_per_shard)

    def share(self, number: int, shard: int) -> tuple[int, int]:
        """Return the nodes of type ``number`` in ``shard``: first and last (exclusive)."""
        count, per_shard = self.nodes[number], self.rows_per_shard[number]
        return min(count, shard * per_shard), min(count, (shard + 1) * per_shard)
