"""Sizes of the embedding tables of a model, and the columns of their ids in a sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        name: name in plans, messages and checkpoints.
        rows: number of categories; ids are 0 to ``rows`` - 1.
        hotness: ids per sample, whose rows are summed.

    Raises:
        ValueError: no rows, 2**31 or more rows, or no ids.
    """

    name: str
    rows: int
    hotness: int

    def __post_init__(self) -> None:
        if not 0 < self.rows < 2**31 or self.hotness < 1:
            raise ValueError(f"table {self.name!r}: {self.rows:,} rows, {self.hotness} ids of a sample")


@dataclass(frozen=True)
class Tables:
    """All tables of a model, in the order of their ids in a sample.

    Attributes:
        width: elements of a row, equal for all tables.

    Raises:
        ValueError: no tables, no width, or a name that occurs twice.
    """

    tables: tuple[Table, ...]
    width: int

    def __post_init__(self) -> None:
        if not self.tables or self.width < 1:
            raise ValueError(f"{len(self.tables)} tables of {self.width} elements a row")
        if len({table.name for table in self.tables}) < len(self.tables):
            raise ValueError("two tables have the same name")

    def capped(self, most: int) -> Tables:
        """Return the same tables with at most ``most`` rows each."""
        smaller = (replace(table, rows=min(table.rows, most)) for table in self.tables)
        return Tables(tuple(smaller), self.width)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def rows(self) -> int:
        """Number of rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def lookups(self) -> int:
        """Number of ids per sample."""
        return sum(table.hotness for table in self.tables)

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """For each table the first of its columns among the ids of a sample."""
        return tuple(accumulate((table.hotness for table in self.tables[:-1]), initial=0))
