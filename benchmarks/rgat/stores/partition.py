"""Which rows of a type lie in which shard: contiguous shares, rank after rank."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Partition:
    """Shares of all types' nodes. Shard s has of a type the nodes s * C to (s + 1) * C, C = ceil(nodes / shards).

    The types lie one behind the other in a shard, and all shards have the same room: the last nodes of a type may leave
    some of it, and whole shards of it, without any.

    Attributes:
        nodes: of each type.
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
        """Where each type begins in a shard."""
        return tuple(accumulate(self.rows_per_shard, initial=0))[:-1]

    @property
    def rows(self) -> int:
        """Of a shard, all types together."""
        return sum(self.rows_per_shard)

    def share(self, number: int, shard: int) -> tuple[int, int]:
        """The nodes of type ``number`` in ``shard``: the first of them, and the one behind the last."""
        count, per_shard = self.nodes[number], self.rows_per_shard[number]
        return min(count, shard * per_shard), min(count, (shard + 1) * per_shard)
