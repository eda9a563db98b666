"""Which keys of a sample belong to which rows of a store, and what updates those rows.

A store holds the rows of many tables, or of parts of them, one behind the other. Shapes: N samples, L columns of keys,
B bags, K lookups of a sample in all bags, M = N K keys, R rows of a store, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bag:
    """Keys of a sample whose rows are added up: those of one table.

    A table may be dealt to several shards: a shard has the keys whose remainder by ``shards`` is its number, and key k
    is row k // shards of it.

    Attributes:
        column: of the bag's first key among a sample's.
        hotness: keys of a sample.
        base: row of the store at which the table, or this shard of it, begins.
        rows: of the whole table. A key outside 0 ... rows - 1, such as the -1 of padding, is nobody's.
        shard: the number of the shard that the store has.
        shards: of the table.

    Raises:
        ValueError: there is no such bag.
    """

    column: int
    hotness: int
    base: int
    rows: int
    shard: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        if min(self.column, self.base) < 0 or min(self.hotness, self.rows) < 1 or not 0 <= self.shard < self.shards:
            raise ValueError(f"no bag of keys can be {self}")

    @property
    def own_rows(self) -> int:
        """Rows of the store that are this table's."""
        return max(0, -(-(self.rows - self.shard) // self.shards))


class Bags:
    """All bags of a store. Make it before anything is captured: it copies its tables to the device.

    Args:
        bags: in the order of their vectors, at least one.
        device: of the store.

    Raises:
        ValueError: there are none, or more rows than int32 counts.

    Attributes:
        bags: as given.
        rows: of the store.
        lookups: keys of a sample in all bags (K).
        columns: the least that the keys must have (L).
        hotness: of the largest bag.
        table_B6: int32 on the device, a row for each bag: column, hotness, base, rows, shard, shards.
        lookup_K2: int32 on the device, a row for each lookup of a sample: bag, column.
        largest_first_B: int32 on the device: the bags, those of the most keys first.
    """

    def __init__(self, bags: Sequence[Bag], device: torch.device | str) -> None:
        self.bags = tuple(bags)
        if not self.bags:
            raise ValueError("a store needs at least one bag")
        self.rows = max(bag.base + bag.own_rows for bag in self.bags)
        if self.rows >= 2**31 - 1:
            raise ValueError(f"{self.rows} rows are more than int32 counts; split the tables over more ranks")
        self.lookups = sum(bag.hotness for bag in self.bags)
        self.columns = max(bag.column + bag.hotness for bag in self.bags)
        self.hotness = max(bag.hotness for bag in self.bags)
        fields = [(bag.column, bag.hotness, bag.base, bag.rows, bag.shard, bag.shards) for bag in self.bags]
        lookups = [(number, bag.column + place) for number, bag in enumerate(self.bags) for place in range(bag.hotness)]
        order = sorted(range(len(self.bags)), key=lambda number: -self.bags[number].hotness)
        self.table_B6 = torch.tensor(fields, dtype=torch.int32, device=device)
        self.lookup_K2 = torch.tensor(lookups, dtype=torch.int32, device=device)
        self.largest_first_B = torch.tensor(order, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.bags)

    def check(self, ids_NL: Tensor, vectors_NBW: Tensor | None = None) -> None:
        """Refuse keys, and vectors of the bags, of other shapes than these bags have.

        Raises:
            ValueError: they do not fit.
        """
        if ids_NL.dim() != 2 or ids_NL.shape[1] < self.columns or (ids_NL.shape[1] > 1 and ids_NL.stride(1) != 1):
            raise ValueError(
                f"keys are (samples, at least {self.columns}), dense within a sample, "
                f"not {tuple(ids_NL.shape)} with strides {ids_NL.stride()}"
            )
        if vectors_NBW is not None and vectors_NBW.shape[:2] != (len(ids_NL), len(self)):
            raise ValueError(
                f"vectors of {len(ids_NL)} samples and {len(self)} bags are not {tuple(vectors_NBW.shape)}"
            )


class SortedKeys(NamedTuple):
    """All keys of a batch, by row; equal rows in the order of samples and, within one, of lookups.

    Attributes:
        row_M: int32, row of the store; ``rows`` for a key that is not ours, so that those come last.
        source_M: int32, sample * bags + bag.
        ours: 0-d int32, on the device, how many keys are ours.
        bags: the number of bags (B).
        rows: of the store (R).
    """

    row_M: Tensor
    source_M: Tensor
    ours: Tensor
    bags: int
    rows: int


@dataclass(frozen=True)
class AdagradRows:
    """Element-wise Adagrad without decays: ``state += g g; row -= rate g / (sqrt(state) + epsilon)``.

    Duchi, Hazan and Singer, JMLR 12 (2011), with epsilon outside the root as ``torch.optim.Adagrad`` has it.

    Attributes:
        epsilon: what is added to the root.
    """

    epsilon: float


@dataclass(frozen=True)
class SgdRows:
    """``row -= rate g``, without a state."""


Rule = AdagradRows | SgdRows
"""What updates the rows."""


def check_update(keys: SortedKeys, gradient_NBW: Tensor, rows_RW: Tensor, state_RW: Tensor | None, rule: Rule) -> None:
    """Refuse what no update can work on.

    Raises:
        ValueError: shapes, dtypes or strides do not fit one another or the rule.
    """
    check_sums(keys, gradient_NBW, rows_RW)
    shape = rows_RW.shape
    if isinstance(rule, SgdRows):
        if state_RW is not None:
            raise ValueError("SGD without momentum has no state")
        return
    wide = torch.float64 if rows_RW.dtype == torch.float64 else torch.float32
    if state_RW is None or state_RW.shape != shape or state_RW.dtype != wide or not state_RW.is_contiguous():
        found = "none" if state_RW is None else f"{state_RW.dtype} {tuple(state_RW.shape)}"
        raise ValueError(f"Adagrad's state of rows in {rows_RW.dtype} is contiguous {wide} {tuple(shape)}, not {found}")


def check_sums(keys: SortedKeys, gradient_NBW: Tensor, rows_RW: Tensor) -> None:
    """Refuse gradients and rows of other shapes than the keys have.

    Raises:
        ValueError: bags, rows or widths differ, or they are not dense.
    """
    if gradient_NBW.dim() != 3 or gradient_NBW.shape[1] != keys.bags or gradient_NBW.stride(2) != 1:
        raise ValueError(
            f"gradients of {keys.bags} bags are dense vectors (samples, {keys.bags}, width), "
            f"not {tuple(gradient_NBW.shape)} with strides {gradient_NBW.stride()}"
        )
    shape = (keys.rows, gradient_NBW.shape[2])
    if rows_RW.shape != shape or not rows_RW.is_contiguous():
        raise ValueError(f"rows are contiguous {shape}, not {tuple(rows_RW.shape)} with strides {rows_RW.stride()}")
