"""Where the rows of every table are: which ranks hold which shards, and how many bytes that takes.

A table is *replicated* on all ranks, or dealt to *shards*: shard s of S has the rows whose numbers leave the remainder
s when they are divided by S. One shard is a table-wise placement, one on every rank a row-wise one. Of a *hybrid* table
the frequent rows are replicated, and the rare ones dealt to shards of which each rank asks only those it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.recommendation.tables import Tables

MARK_BYTES = 4
"""Of a row of a hybrid table, on every rank."""


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
class Hybrid:
    """The placement of a table of which all ranks have the frequent rows.

    The shards are those of the whole table: they keep room for the frequent rows too, so that a checkpoint has the same
    form under every plan. For a batch of ``samples`` samples a rank asks a shard for at most ``slots`` different rows.

    Attributes:
        table: its number.
        frequent: the ids of the frequent rows, each once; may be empty.
        ranks: that hold the shards, in the shards' order.
        slots: different rare rows of one shard that the samples of one rank may have.
        samples: of a rank for which the slots were counted. A larger batch has as many times the slots as it has parts
            of so many samples, which is enough wherever each part is.
    """

    table: int
    frequent: tuple[int, ...]
    ranks: tuple[int, ...]
    slots: int
    samples: int

    def capacity(self, shard: Shard, batch: int, tables: Tables) -> int:
        """Slots for the rows of ``shard`` that a batch of one rank asks for: never more than there can be."""
        lookups = batch * tables.tables[self.table].hotness
        return min(self.slots * -(-batch // self.samples), lookups, shard.rows(tables))


@dataclass(frozen=True)
class Plan:
    """The placement of all tables.

    Attributes:
        tables: the tables.
        ranks: that hold them.
        holders: for each table the ranks that hold its shards, in the shards' order; none for a replicated table, and
            for a hybrid one.
        hybrids: the hybrid tables, in the order of the tables.

    Raises:
        ConfigError: a table has two shards on a rank, or one on a rank that is not there; or frequent rows or slots of
            a hybrid table are none.
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
        """Numbers of the tables that every rank holds wholly."""
        hybrid = {hybrid.table for hybrid in self.hybrids}
        return tuple(table for table, ranks in enumerate(self.holders) if not ranks and table not in hybrid)

    @property
    def with_frequent(self) -> tuple[Hybrid, ...]:
        """The hybrid tables that have frequent rows."""
        return tuple(hybrid for hybrid in self.hybrids if hybrid.frequent)

    @property
    def everywhere(self) -> tuple[int, ...]:
        """Numbers of the tables of which every rank has rows: the replicated ones, then those with frequent rows."""
        return (*self.replicated, *(hybrid.table for hybrid in self.with_frequent))

    @property
    def own_sums(self) -> tuple[int, ...]:
        """The tables of the vectors that a rank makes for its own samples: of :attr:`everywhere`, then of rare rows."""
        return (*self.everywhere, *(hybrid.table for hybrid in self.hybrids))

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """The shards on ``rank`` that sum their rows there, in the order of the tables; none of hybrid tables."""
        return tuple(
            Shard(table, ranks.index(rank), len(ranks)) for table, ranks in enumerate(self.holders) if rank in ranks
        )

    def rare_shards_of(self, rank: int) -> tuple[Shard, ...]:
        """The shards of hybrid tables on ``rank``, in the order of the tables."""
        return tuple(
            Shard(hybrid.table, hybrid.ranks.index(rank), len(hybrid.ranks))
            for hybrid in self.hybrids
            if rank in hybrid.ranks
        )

    def rows_of(self, rank: int) -> int:
        """Rows that ``rank`` holds, replicated ones too."""
        own = sum(shard.rows(self.tables) for shard in (*self.shards_of(rank), *self.rare_shards_of(rank)))
        frequent = sum(len(hybrid.frequent) for hybrid in self.hybrids)
        return own + frequent + sum(self.tables.tables[table].rows for table in self.replicated)

    def lookups_of(self, rank: int) -> float:
        """Ids of a sample whose rows are expected on ``rank``, of the shards; of hybrid tables as many as slots."""
        summed = sum(self.tables.tables[shard.table].hotness / shard.shards for shard in self.shards_of(rank))
        return summed + sum(hybrid.slots / hybrid.samples for hybrid in self.hybrids if rank in hybrid.ranks)

    def fullest_bytes(self, row_bytes: int) -> int:
        """Bytes of the rank that holds most, of rows with their optimizer's state of ``row_bytes`` each."""
        return max(self.bytes_of(rank, row_bytes) for rank in range(self.ranks))

    def bytes_of(self, rank: int, row_bytes: int) -> int:
        """Bytes of ``rank``, likewise; for every row of a hybrid table 4 say whether it is frequent."""
        marks = sum(self.tables.tables[hybrid.table].rows for hybrid in self.hybrids)
        return self.rows_of(rank) * row_bytes + MARK_BYTES * marks

    def check_memory(self, row_bytes: int, capacity: int) -> None:
        """Refuse a plan that does not fit.

        Args:
            row_bytes: of a row with its optimizer's state.
            capacity: bytes of a rank for tables.

        Raises:
            ConfigError: it names the fullest rank.
        """
        size, rank = max((self.bytes_of(rank, row_bytes), -rank) for rank in range(self.ranks))
        if size > capacity:
            raise ConfigError(
                f"plan: rank {-rank} would hold {size:,} bytes of rows and optimizer's state, of "
                f"{capacity:,} that it has for them; split tables over more ranks, or use more of them"
            )

    def text(self, row_bytes: int) -> str:
        """The plan as a table of ranks: lookups of a sample, bytes, and shards; then the replicated tables, if any.

        Of several ranks, last comes what is sent for a sample where every rank sends to every other one: ids to each
        shard of their table, and a vector from each shard, as many gradients going back. What a rank sends itself is
        counted.

        Args:
            row_bytes: of a row with its optimizer's state.
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
