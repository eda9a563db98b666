"""Where the rows of every table are: which ranks hold which shards, and how many bytes that takes.

A table is *replicated* on all ranks, or dealt to *shards*: shard s of S has the rows whose numbers leave the remainder
s when they are divided by S. One shard is a table-wise placement, one on every rank a row-wise one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.recommendation.tables import Tables


@dataclass(frozen=True)
class Shard:
    """A part of a table.

    Attributes:
        table: its number.
        shard: remainder of its rows' numbers.
        shards: what they are divided by; row r of the table is row r // ``shards`` of its shard.
    """

    table: int
    shard: int
    shards: int

    def rows(self, tables: Tables) -> int:
        """Rows of the shard."""
        return max(0, -(-(tables.tables[self.table].rows - self.shard) // self.shards))


@dataclass(frozen=True)
class Plan:
    """The placement of all tables.

    Attributes:
        tables: the tables.
        ranks: that hold them.
        holders: for each table the ranks that hold its shards, in the shards' order; none for a replicated table.

    Raises:
        ConfigError: a table has two shards on a rank, or one on a rank that is not there.
    """

    tables: Tables
    ranks: int
    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.holders) != len(self.tables):
            raise ConfigError(f"plan: {len(self.holders)} placements for {len(self.tables)} tables")
        for table, ranks in zip(self.tables.tables, self.holders, strict=True):
            if len(set(ranks)) < len(ranks):
                raise ConfigError(f"plan: table {table.name!r} has two shards on one rank: {list(ranks)}")
            if outside := [rank for rank in ranks if not 0 <= rank < self.ranks]:
                raise ConfigError(f"plan: table {table.name!r} is on rank {outside[0]} of {self.ranks} ranks")

    @property
    def replicated(self) -> tuple[int, ...]:
        """Numbers of the tables that every rank holds wholly."""
        return tuple(table for table, ranks in enumerate(self.holders) if not ranks)

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """The shards on ``rank``, in the order of the tables."""
        return tuple(
            Shard(table, ranks.index(rank), len(ranks)) for table, ranks in enumerate(self.holders) if rank in ranks
        )

    def rows_of(self, rank: int) -> int:
        """Rows that ``rank`` holds, replicated ones too."""
        own = sum(shard.rows(self.tables) for shard in self.shards_of(rank))
        return own + sum(self.tables.tables[table].rows for table in self.replicated)

    def lookups_of(self, rank: int) -> float:
        """Ids of a sample whose rows are expected on ``rank``, of the shards."""
        return sum(self.tables.tables[shard.table].hotness / shard.shards for shard in self.shards_of(rank))

    def fullest_bytes(self, row_bytes: int) -> int:
        """Bytes of the rank that holds most, of rows with their optimizer's state of ``row_bytes`` each."""
        return max(self.rows_of(rank) for rank in range(self.ranks)) * row_bytes

    def check_memory(self, row_bytes: int, capacity: int) -> None:
        """Refuse a plan that does not fit.

        Args:
            row_bytes: of a row with its optimizer's state.
            capacity: bytes of a rank for tables.

        Raises:
            ConfigError: it names the fullest rank.
        """
        rows, rank = max((self.rows_of(rank), -rank) for rank in range(self.ranks))
        if rows * row_bytes > capacity:
            raise ConfigError(
                f"plan: rank {-rank} would hold {rows * row_bytes:,} bytes of rows and optimizer's state, of "
                f"{capacity:,} that it has for them; split tables over more ranks, or use more of them"
            )

    def text(self, row_bytes: int) -> str:
        """The plan as a table of ranks: lookups of a sample, bytes, and shards; then the replicated tables.

        Of several ranks, last comes what is sent for a sample where every rank sends to every other one: ids to each
        shard of their table, and a vector from each shard, as many gradients going back. What a rank sends itself is
        counted.

        Args:
            row_bytes: of a row with its optimizer's state.
        """
        lines = [("rank", "lookups", "GB", "tables (shard/shards)")]
        for rank in range(self.ranks):
            shards = [
                self.tables.tables[s.table].name + (f" {s.shard}/{s.shards}" if s.shards > 1 else "")
                for s in self.shards_of(rank)
            ]
            size = self.rows_of(rank) * row_bytes / 1e9
            lines.append((str(rank), f"{self.lookups_of(rank):.2f}", f"{size:.3f}", ", ".join(shards) or "-"))
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        shown = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(line[:3], widths, strict=True)), line[3]])
            for line in lines
        ]
        names = ", ".join(self.tables.tables[table].name for table in self.replicated)
        ids = sum(table.hotness * len(ranks) for table, ranks in zip(self.tables.tables, self.holders, strict=True))
        sent = f"sent for a sample: {ids} ids, {sum(map(len, self.holders))} vectors"
        return "\n".join([*shown, f"on every rank: {names or '-'}", *([sent] if self.ranks > 1 else [])])


def table_wise(tables: Tables, ranks: int) -> Plan:
    """Whole tables, the hottest first, each to the rank with the fewest lookups until then."""
    load = [(0, rank) for rank in range(ranks)]
    holders: list[tuple[int, ...]] = [()] * len(tables)
    for number in sorted(range(len(tables)), key=lambda number: -tables.tables[number].hotness):
        lookups, rank = min(load)
        load[load.index((lookups, rank))] = (lookups + tables.tables[number].hotness, rank)
        holders[number] = (rank,)
    return Plan(tables, ranks, tuple(holders))


def row_wise(tables: Tables, ranks: int) -> Plan:
    """Every table over all ranks."""
    return Plan(tables, ranks, (tuple(range(ranks)),) * len(tables))


def spread_over_nodes(tables: Tables, ranks_per_node: int, nodes: int, nodes_of: Sequence[Sequence[int]]) -> Plan:
    """Every table over all ranks of the nodes that it is on; replicated where there are none.

    Args:
        tables: the tables.
        ranks_per_node: which follow one another.
        nodes: of them.
        nodes_of: for each table.
    """
    holders = tuple(
        tuple(node * ranks_per_node + rank for node in on for rank in range(ranks_per_node)) for on in nodes_of
    )
    return Plan(tables, nodes * ranks_per_node, holders)
