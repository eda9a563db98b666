"""Sizes of the embedding tables of a model, the columns of their ids in a sample, and synthetic ids.

B samples, L ids of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from common.ops.random_bits.reference import words


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


Distribution = Literal["uniform", "zipf"]
EXPONENT = 1.05
"""Exponent of the skewed ids: the k-th id of a table has a probability proportional to k ** -EXPONENT."""
SITES = 1 << 10
"""Sites of random bits per table: one for each id of a bag."""


def synthetic_ids(tables: Tables, samples: int, distribution: Distribution, generator: torch.Generator) -> Tensor:
    """Return random ids for all tables: int32 (B, L), on the CPU.

    Args:
        distribution: ``uniform``: all ids are independent. ``zipf``: the first id of a bag is skewed. The others are
            a uniform function of the first, as in the multi-hot set of DLRM-DCNv2.
        generator: generator on the CPU.
    """
    draw = _uniform if distribution == "uniform" else _skewed
    columns = [draw(table, number, samples, generator) for number, table in enumerate(tables.tables)]
    return torch.cat(columns, dim=1)


def _uniform(table: Table, number: int, samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(table.rows, (samples, table.hotness), generator=generator, dtype=torch.int32)


def _skewed(table: Table, number: int, samples: int, generator: torch.Generator) -> Tensor:
    """Draw the first id by inverting the distribution, which temporarily needs 16 bytes of host memory per row."""
    shares_R = torch.arange(1, table.rows + 1, dtype=torch.float64).pow_(-EXPONENT).cumsum_(0)
    chance_B1 = torch.rand((samples, 1), generator=generator, dtype=torch.float64)
    first_B1 = torch.searchsorted(shares_R, chance_B1 * shares_R[-1]).clamp_(max=table.rows - 1)
    site = number * SITES + torch.arange(1, table.hotness)
    bits = words(first_B1, torch.zeros((), dtype=torch.int64), site).long() & 0xFFFFFFFF
    return torch.cat([first_B1, bits % table.rows], dim=1).int()
