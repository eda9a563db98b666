"""Placement of the rows of every table: which ranks hold which shards, and how many bytes they take.

A table is *replicated* on all ranks, or split into *shards*: shard s of S has the rows whose number modulo S is s.
One shard is a table-wise placement, one shard per rank a row-wise placement. Of a *hybrid* table, the frequent rows
are replicated and the rare rows are sharded; each rank requests only the rare rows that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.recommendation.tables import Tables

MARK_BYTES = 4
"""Bytes per row of a hybrid table on every rank, which mark frequent rows."""


@dataclass(frozen=True)
class TableShard:
    """A part of a table.

    Attributes:
        shard: index of the shard; the row numbers modulo ``shards`` equal it.
        shards: number of shards; row r of the table is row r // ``shards`` of its shard.
    """

    table: int
    shard: int
    shards: int

    def rows(self, tables: Tables) -> int:
        """Return the number of rows of the shard."""
        return max(0, -(-(tables.tables[self.table].rows - self.shard) // self.shards))


@dataclass(frozen=True)
class Hybrid:
    """Placement of a table whose frequent rows are on all ranks.

    The shards cover the whole table and reserve memory for the frequent rows too, so a checkpoint has the same form
    under every plan. For a batch of ``samples`` samples a rank requests at most ``slots`` different rows from a
    shard.

    Attributes:
        frequent: unique ids of the frequent rows; may be empty.
        ranks: ranks that hold the shards, in the order of the shards.
        slots: largest number of different rare rows of one shard among the samples of one rank.
        samples: samples of a rank for which the slots were counted. A larger batch gets ``slots`` for each started
            part of this size, which is enough if ``slots`` is enough for each part.
    """

    table: int
    frequent: tuple[int, ...]
    ranks: tuple[int, ...]
    slots: int
    samples: int

    def capacity(self, shard: TableShard, batch: int, tables: Tables) -> int:
        """Return the slots for the rows of ``shard`` that a batch of one rank requests; at most the possible rows.

        Args:
            batch: samples of the batch on one rank.
        """
        lookups = batch * tables.tables[self.table].hotness
        return min(self.slots * -(-batch // self.samples), lookups, shard.rows(tables))


@dataclass(frozen=True)
class Placement:
    """Placement of all tables.

    Attributes:
        holders: for each table the ranks that hold its shards, in the order of the shards; empty for replicated and
            hybrid tables.
        hybrids: the hybrid tables, in the order of the tables.

    Raises:
        ConfigError: a table has two shards on a rank, or one on an unknown rank; or frequent rows or slots of a
            hybrid table are invalid.
    """

    tables: Tables
    ranks: int
    holders: tuple[tuple[int, ...], ...]
    hybrids: tuple[Hybrid, ...] = ()

    def __post_init__(self) -> None:
        if len(self.holders) != len(self.tables):
            raise ConfigError(f"plan: {len(self.holders)} placements for {len(self.tables)} tables")
        numbers = [hybrid.table for hybrid in self.hybrids]
        if numbers != sorted({number for number in numbers if 0 <= number < len(self.tables)}):
            raise ConfigError(f"plan: hybrid tables {numbers} of {len(self.tables)} are not in order")
        placed = {hybrid.table: hybrid.ranks for hybrid in self.hybrids}
        for number, (table, ranks) in enumerate(zip(self.tables.tables, self.holders, strict=True)):
            if number in placed and ranks:
                raise ConfigError(f"plan: table {table.name!r} is hybrid and sharded at once")
            held = placed.get(number, ranks)
            if len(set(held)) < len(held):
                raise ConfigError(f"plan: table {table.name!r} has two shards on one rank: {list(held)}")
            if outside := [rank for rank in held if not 0 <= rank < self.ranks]:
                raise ConfigError(f"plan: table {table.name!r} is on rank {outside[0]} of {self.ranks} ranks")
        for hybrid in self.hybrids:
            self._check(hybrid)

    @property
    def replicated(self) -> tuple[int, ...]:
        """Numbers of the tables that every rank holds completely."""
        hybrid = {hybrid.table for hybrid in self.hybrids}
        return tuple(table for table, ranks in enumerate(self.holders) if not ranks and table not in hybrid)

    @property
    def with_frequent(self) -> tuple[Hybrid, ...]:
        """Hybrid tables that have frequent rows."""
        return tuple(hybrid for hybrid in self.hybrids if hybrid.frequent)

    @property
    def everywhere(self) -> tuple[int, ...]:
        """Numbers of the tables with rows on every rank: the replicated ones, then those with frequent rows."""
        return (*self.replicated, *(hybrid.table for hybrid in self.with_frequent))

    @property
    def own_sums(self) -> tuple[int, ...]:
        """Tables whose vectors a rank sums for its own samples: those of :attr:`everywhere`, then all hybrid ones."""
        return (*self.everywhere, *(hybrid.table for hybrid in self.hybrids))

    def shards_of(self, rank: int) -> tuple[TableShard, ...]:
        """Return the shards on ``rank`` that sum their rows there, in table order; without hybrid tables."""
        return tuple(
            TableShard(table, ranks.index(rank), len(ranks))
            for table, ranks in enumerate(self.holders)
            if rank in ranks
        )

    def rare_shards_of(self, rank: int) -> tuple[TableShard, ...]:
        """Return the shards of hybrid tables on ``rank``, in the order of the tables."""
        return tuple(
            TableShard(hybrid.table, hybrid.ranks.index(rank), len(hybrid.ranks))
            for hybrid in self.hybrids
            if rank in hybrid.ranks
        )

    def rows_of(self, rank: int) -> int:
        """Return the number of rows that ``rank`` holds, including replicated ones."""
        own = sum(shard.rows(self.tables) for shard in (*self.shards_of(rank), *self.rare_shards_of(rank)))
        frequent = sum(len(hybrid.frequent) for hybrid in self.hybrids)
        return own + frequent + sum(self.tables.tables[table].rows for table in self.replicated)

    def ids_of(self, rank: int) -> int:
        """Return the ids of a sample that are sent to ``rank`` for the tables of :meth:`shards_of`."""
        return sum(self.tables.tables[shard.table].hotness for shard in self.shards_of(rank))

    def lookups_of(self, rank: int) -> float:
        """Return the expected lookups per sample in the shards of ``rank``; for hybrid tables the slots count."""
        summed = sum(self.tables.tables[shard.table].hotness / shard.shards for shard in self.shards_of(rank))
        return summed + sum(hybrid.slots / hybrid.samples for hybrid in self.hybrids if rank in hybrid.ranks)

    def fullest_bytes(self, row_bytes: int) -> int:
        """Return the largest number of bytes on any rank. Each row, with its optimizer state, takes ``row_bytes``."""
        return max(self.bytes_of(rank, row_bytes) for rank in range(self.ranks))

    def bytes_of(self, rank: int, row_bytes: int) -> int:
        """Return the bytes on ``rank``; every row of a hybrid table takes another 4 bytes, which mark frequent rows."""
        marks = sum(self.tables.tables[hybrid.table].rows for hybrid in self.hybrids)
        return self.rows_of(rank) * row_bytes + MARK_BYTES * marks

    def check_memory(self, row_bytes: int, capacity: int) -> None:
        """Refuse a plan that does not fit the memory.

        Args:
            row_bytes: bytes of a row with its optimizer state.
            capacity: bytes on a rank for tables.

        Raises:
            ConfigError: the plan does not fit. The message names the fullest rank.
        """
        size, rank = max((self.bytes_of(rank, row_bytes), -rank) for rank in range(self.ranks))
        if size > capacity:
            raise ConfigError(
                f"plan: rank {-rank} would hold {size:,} bytes of rows and optimizer's state, of "
                f"{capacity:,} that it has for them; split tables over more ranks, or use more of them"
            )

    def text(self, row_bytes: int) -> str:
        """Return the plan as a table with one line per rank: lookups per sample, bytes, and shards.

        Below are the tables and rows on every rank, if any. With several ranks, the last line has the ids and vectors
        sent per sample if every rank sends directly to every other one: ids to each shard of their table, and a
        vector from each shard; as many gradients go back. It includes what a rank sends to itself.

        Args:
            row_bytes: bytes of a row with its optimizer state.
        """
        lines = [("rank", "lookups/sample", "rows and state, GB", "tables (shard/shards)")]
        for rank in range(self.ranks):
            shards = [
                self.tables.tables[s.table].name + (f" {s.shard}/{s.shards}" if s.shards > 1 else "")
                for s in sorted((*self.shards_of(rank), *self.rare_shards_of(rank)), key=lambda shard: shard.table)
            ]
            size = self.bytes_of(rank, row_bytes) / 1e9
            lines.append((str(rank), f"{self.lookups_of(rank):.2f}", f"{size:.3f}", ", ".join(shards) or "-"))
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        shown = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(line[:3], widths, strict=True)), line[3]])
            for line in lines
        ]
        names = [self.tables.tables[table].name for table in self.replicated]
        names += [f"{len(h.frequent):,} rows of {self.tables.tables[h.table].name}" for h in self.with_frequent]
        ids = sum(table.hotness * len(ranks) for table, ranks in zip(self.tables.tables, self.holders, strict=True))
        rare = sum(hybrid.slots * len(hybrid.ranks) / hybrid.samples for hybrid in self.hybrids)
        counts = (_number(count + rare) for count in (ids, sum(map(len, self.holders))))
        sent = "sent for a sample: {} ids, {} vectors".format(*counts)
        everywhere = [f"on every rank: {', '.join(names)}"] if names else []
        return "\n".join([*shown, *everywhere, *([sent] if self.ranks > 1 else [])])

    def _check(self, hybrid: Hybrid) -> None:
        table = self.tables.tables[hybrid.table]
        if not hybrid.ranks:
            raise ConfigError(f"plan: hybrid table {table.name!r} has no shards")
        if hybrid.slots < 1 or hybrid.samples < 1:
            raise ConfigError(
                f"plan: hybrid table {table.name!r} has {hybrid.slots} slots for {hybrid.samples} samples"
            )
        if len(set(hybrid.frequent)) < len(hybrid.frequent):
            raise ConfigError(f"plan: hybrid table {table.name!r} has a frequent row twice")
        if outside := [key for key in hybrid.frequent if not 0 <= key < table.rows]:
            raise ConfigError(f"plan: frequent row {outside[0]} of table {table.name!r}, which has {table.rows:,} rows")


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def table_wise(tables: Tables, ranks: int) -> Placement:
    """Return a plan of whole tables: by falling lookups, each goes to the rank with the fewest lookups so far."""
    load = [(0, rank) for rank in range(ranks)]
    holders: list[tuple[int, ...]] = [()] * len(tables)
    for number in sorted(range(len(tables)), key=lambda number: -tables.tables[number].hotness):
        lookups, rank = min(load)
        load[load.index((lookups, rank))] = (lookups + tables.tables[number].hotness, rank)
        holders[number] = (rank,)
    return Placement(tables, ranks, tuple(holders))


def row_wise(tables: Tables, ranks: int) -> Placement:
    """Return a plan with every table sharded over all ranks."""
    return Placement(tables, ranks, (tuple(range(ranks)),) * len(tables))


def spread_over_nodes(tables: Tables, ranks_per_node: int, nodes: int, nodes_of: Sequence[Sequence[int]]) -> Placement:
    """Return a plan with every table sharded over all ranks of its nodes; replicated if it has no nodes.

    Args:
        ranks_per_node: number of consecutive ranks in a node.
    """
    holders = tuple(
        tuple(node * ranks_per_node + rank for node in on for rank in range(ranks_per_node)) for on in nodes_of
    )
    return Placement(tables, nodes * ranks_per_node, holders)
