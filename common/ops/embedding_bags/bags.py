"""Mapping from the keys of a sample to the rows of a store, and the update rules of rows.

A store is the concatenation of many tables or shards of tables. Shapes: N samples, L columns of keys, B bags, K lookups
per sample in all bags, M = N K keys, R rows of a store, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bag:
    """The keys of a sample for one table, whose rows are added.

    A table may be sharded: key k is row k // shards of the shard k % shards.

    Attributes:
        column: column of the first key of the bag among the keys of a sample.
        hotness: number of keys of the bag per sample.
        base: row of the store at which the table or shard begins.
        rows: number of rows of the whole table. Keys outside 0 ... rows - 1, such as padding with -1, are ignored.
        shard: index of the shard in the store.
        shards: number of shards of the table.

    Raises:
        ValueError: a number is out of range.
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
        """Number of rows of the store that belong to this table."""
        return max(0, -(-(self.rows - self.shard) // self.shards))


class Bags:
    """All bags of a store. Create it before the capture of a CUDA graph, because it copies tensors to the device.

    Args:
        bags: at least one bag, in the order of their vectors.

    Raises:
        ValueError: there are no bags, or too many rows for int32 indices.

    Attributes:
        rows: number of rows of the store (R).
        lookups: number of keys of a sample in all bags (K).
        columns: smallest number of key columns that includes all bags (L).
        hotness: largest hotness of the bags.
        table_B6: column, hotness, base, rows, shard, shards of each bag; int32 on the device.
        lookup_K2: bag and column of each lookup of a sample; int32 on the device.
        largest_first_B: indices of the bags in order of falling hotness; int32 on the device.
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
        lookups = [
            (number, bag.column + lookup) for number, bag in enumerate(self.bags) for lookup in range(bag.hotness)
        ]
        order = sorted(range(len(self.bags)), key=lambda number: -self.bags[number].hotness)
        self.table_B6 = torch.tensor(fields, dtype=torch.int32, device=device)
        self.lookup_K2 = torch.tensor(lookups, dtype=torch.int32, device=device)
        self.largest_first_B = torch.tensor(order, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.bags)

    def check(self, ids_NL: Tensor, vectors: Tensor | PeerVectors | None = None) -> None:
        """Check the shapes of keys and of the vectors of bags, (N, B, W) or in memory of several ranks.

        Raises:
            ValueError: shapes or strides do not match the bags.
        """
        if ids_NL.dim() != 2 or ids_NL.shape[1] < self.columns or (ids_NL.shape[1] > 1 and ids_NL.stride(1) != 1):
            raise ValueError(
                f"keys are (samples, at least {self.columns}), dense within a sample, "
                f"not {tuple(ids_NL.shape)} with strides {ids_NL.stride()}"
            )
        if vectors is None:
            return
        if isinstance(vectors, PeerVectors):
            shape: tuple[int, ...] = (len(vectors.buffers) * vectors.samples, len(vectors.positions), vectors.width)
        else:
            shape = tuple(vectors.shape)
        if shape[:2] != (len(ids_NL), len(self)):
            raise ValueError(f"vectors of {len(ids_NL)} samples and {len(self)} bags are not {shape}")


@dataclass(frozen=True, eq=False)
class PeerVectors:
    """Vectors in memory of several ranks that this rank maps, as the output of a lookup for the samples of all of them.

    Sample n belongs to buffer n // ``samples``, and is sample b = n % ``samples`` there. The vector of bag i for this
    sample is row ``first + b * stride`` of the buffer, with the i-th pair of ``positions``.

    Attributes:
        buffers: [ranks], each contiguous (rows, W), all of the same shape and dtype.
        address_G: addresses of the buffers, int64 [ranks] on the device.
        samples: samples per buffer.
        positions: (first, stride) of each bag.
        position_B2: the same, int32 on the device.
    """

    buffers: tuple[Tensor, ...]
    address_G: Tensor
    samples: int
    positions: tuple[tuple[int, int], ...]
    position_B2: Tensor

    @property
    def width(self) -> int:
        """W, elements of a vector."""
        return self.buffers[0].shape[1]

    def of_bag(self, number: int) -> list[Tensor]:
        """Return the vectors of a bag, one view (samples, W) per buffer."""
        first, stride = self.positions[number]
        return [buffer[first::stride][: self.samples] for buffer in self.buffers]


class SortedKeys(NamedTuple):
    """All keys of a batch, sorted by row. Keys of the same row are in the order of samples, then of lookups.

    Attributes:
        row_M: row of the store, int32; ``rows`` for keys without a row in this store, which are last.
        source_M: sample * bags + bag, int32.
        ours: number of keys with a row in this store, 0-d int32 on the device.
        bags: number of bags (B).
        rows: number of rows of the store (R).
    """

    row_M: Tensor
    source_M: Tensor
    ours: Tensor
    bags: int
    rows: int


@dataclass(frozen=True)
class AdagradRows:
    """Element-wise Adagrad without decays: ``state += g g; row -= rate g / (sqrt(state) + epsilon)``.

    Duchi, Hazan and Singer, JMLR 12 (2011), with epsilon outside the root as in ``torch.optim.Adagrad``.
    """

    epsilon: float


@dataclass(frozen=True)
class SgdRows:
    """SGD without state: ``row -= rate g``."""


Rule = AdagradRows | SgdRows
"""Update rule of the rows."""


def check_update(keys: SortedKeys, gradient_NBW: Tensor, rows_RW: Tensor, state_RW: Tensor | None, rule: Rule) -> None:
    """Check the tensors of an update.

    Raises:
        ValueError: shapes, dtypes or strides do not match each other or the rule.
    """
    check_sums(keys, gradient_NBW, rows_RW)
    shape = rows_RW.shape
    if isinstance(rule, SgdRows):
        if state_RW is not None:
            raise ValueError("SGD without momentum has no state")
        return
    state_dtype = torch.float64 if rows_RW.dtype == torch.float64 else torch.float32
    if state_RW is None or state_RW.shape != shape or state_RW.dtype != state_dtype or not state_RW.is_contiguous():
        found = "none" if state_RW is None else f"{state_RW.dtype} {tuple(state_RW.shape)}"
        raise ValueError(
            f"Adagrad's state of rows in {rows_RW.dtype} is contiguous {state_dtype} {tuple(shape)}, not {found}"
        )


def check_sums(keys: SortedKeys, gradient_NBW: Tensor, rows_RW: Tensor) -> None:
    """Check that gradients and rows match the keys.

    Raises:
        ValueError: bags, rows or widths differ, rows are not contiguous, or the vectors of gradients are not.
    """
    if gradient_NBW.dim() != 3 or gradient_NBW.shape[1] != keys.bags or gradient_NBW.stride(2) != 1:
        raise ValueError(
            f"gradients of {keys.bags} bags are dense vectors (samples, {keys.bags}, width), "
            f"not {tuple(gradient_NBW.shape)} with strides {gradient_NBW.stride()}"
        )
    shape = (keys.rows, gradient_NBW.shape[2])
    if rows_RW.shape != shape or not rows_RW.is_contiguous():
        raise ValueError(f"rows are contiguous {shape}, not {tuple(rows_RW.shape)} with strides {rows_RW.stride()}")
