"""Cases of embedding bags: 26 tables of DLRM-DCNv2 with up to 5 million rows, 214 keys per sample, 128 values per row.

Bytes count each row that occurs once: ``forward`` reads it, and ``update`` reads and writes the row and its optimizer
state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.cases import Case, Draw, Pass, size_of
from common.ops.embedding_bags.bags import AdagradRows, Bag, Bags, SgdRows
from common.ops.embedding_bags.reference import EmbeddingBags, sort_reference
from common.ops.random_bits.reference import words
from common.ops.sizes import recommendation

SAMPLES = recommendation.SAMPLES

TABLES = (
    (5_000_000, 3), (39_060, 2), (17_295, 1), (7_424, 2), (20_265, 6), (3, 1), (7_122, 1), (1_543, 1), (63, 1),
    (5_000_000, 7), (3_067_956, 3), (405_282, 8), (10, 1), (2_209, 6), (11_938, 9), (155, 5), (4, 1), (976, 1), (14, 1),
    (5_000_000, 12), (5_000_000, 100), (5_000_000, 27), (590_152, 10), (12_973, 3), (108, 1), (36, 1),
)  # fmt: skip
"""Rows and hotness of each table. Five tables of the benchmark have 40 million rows, too many for one GPU."""

WIDTH = 128

EXPONENT = 1.05
"""Exponent of skewed keys: the k-th key of a table has a probability proportional to ``k**-EXPONENT``."""

RATE, EPSILON = 0.004, 1e-8


def keys(draw: Draw, samples: int, tables: Sequence[tuple[int, int]], skewed: bool, outside: int = 0) -> Tensor:
    """Return keys, int32 (samples, lookups): uniform, or with a skewed first key that determines the rest of its bag.

    Skewed keys are like the benchmark's multi-hot data set, where the same first key always comes with the same other
    keys. Uniform keys may lie outside their table by up to ``outside`` on both sides.
    """
    seed, columns = torch.zeros((), dtype=torch.int64, device=draw.device), []
    for number, (rows, hotness) in enumerate(tables):
        if not skewed:
            columns.append(draw.integers(-outside, rows + outside, samples, hotness, dtype=torch.int32))
            continue
        # inverse of the cumulative distribution on 1 ... rows + 1
        chance = draw.uniform(samples, 1, dtype=torch.float64)
        first = ((1 - chance * (1 - (rows + 1.0) ** (1 - EXPONENT))) ** (1 / (1 - EXPONENT))).int() - 1
        first = first.clamp(0, rows - 1)
        position = torch.arange(1, hotness, device=draw.device)
        others = words(first, seed, number * 128 + position).long() & 0xFFFFFFFF
        columns.append(torch.cat([first, (others % rows).int()], 1))
    return torch.cat(columns, 1)


def bags_of(tables: Sequence[tuple[int, int]], device: torch.device, shard: int = 0, shards: int = 1) -> Bags:
    """Return the bags of consecutive tables (rows, hotness), or of one shard of each table."""
    bags: list[Bag] = []
    column = base = 0
    for rows, hotness in tables:
        bags.append(Bag(column, hotness, base, rows, shard, shards))
        column, base = column + hotness, base + bags[-1].own_rows
    return Bags(bags, device)


def passes(
    function: EmbeddingBags,
    draw: Draw,
    samples: int,
    tables: Sequence[tuple[int, int]],
    width: int,
    skewed: bool,
    outside: int = 0,
    shard: int = 0,
    shards: int = 1,
    row_dtype: torch.dtype = torch.float32,
    sum_dtype: torch.dtype = torch.float32,
    rate: float = RATE,
    adagrad: bool = True,
    exact: bool = False,
    by_chance: bool = False,
    write: bool = True,
) -> list[Pass]:
    """Make the passes: forward, sort of the keys, update, and with ``exact`` also the gradient of all rows.

    Vectors and keys are views of wider tensors, and bags are in the reverse order of their columns. With ``exact``,
    sums of the values do not depend on the order.
    """
    bags = Bags(bags_of(tables, draw.device, shard, shards).bags[::-1], draw.device)
    ids = F.pad(keys(draw, samples, tables, skewed, outside), (0, 1))[:, :-1]
    rows = draw.normal(bags.rows, width, dtype=row_dtype)
    state = draw.uniform(bags.rows, width, low=0.5, high=1.5, dtype=torch.float32) if adagrad else None
    vectors, gradient = (draw.normal(samples, 1 + len(bags), width) for _ in range(2))
    if exact:
        for values in (rows, gradient):
            values.mul_(4).round_().div_(4)
    sums = torch.empty(bags.rows if exact else 0, width, dtype=sum_dtype, device=draw.device)
    found, gradient = sort_reference(ids, bags), gradient[:, 1:]
    rule = AdagradRows(EPSILON) if adagrad else SgdRows()
    scalars = [torch.full((), value, device=draw.device) for value in (rate, 0.5, write)]
    seed = draw.seed() if by_chance else None

    def forward() -> Tensor:
        function.pool(rows, ids, bags, vectors[:, 1:])
        return vectors

    def update() -> tuple[Tensor, Tensor | None]:
        function.update(found, gradient, rows, state, rule, *scalars, rounding_seed=seed)
        return rows, state

    def dense_gradient() -> Tensor:
        function.dense_gradient(found, gradient, sums)
        return sums

    count, distinct = len(found.row_M), len(found.row_M.unique())
    row_bytes, vector_bytes = width * rows.element_size(), size_of(gradient)
    state_bytes = distinct * width * 4 * adagrad
    return [
        Pass("forward", forward, distinct * row_bytes + 4 * count + vector_bytes),
        Pass("sort", lambda: function.sort(ids, bags), 12.0 * count),
        Pass("update", update, 2 * (distinct * row_bytes + state_bytes) + 8 * count + vector_bytes),
        *([Pass("dense gradient", dense_gradient, size_of(sums) + 8 * count + vector_bytes)] if exact else []),
    ]


RECIPE = {"samples": SAMPLES, "tables": TABLES, "width": WIDTH}
SMALL = {"samples": 13, "tables": ((9, 2), (30, 3), (4, 5)), "width": 12, "rate": 0.5}
CAPPED = {"samples": 2000, "tables": tuple((min(rows, 100_000), hotness) for rows, hotness in TABLES), "rate": 0.5}

CASES = (
    Case(
        "uniform",
        passes,
        {**RECIPE, "skewed": False},
        tests=[
            {**SMALL, "outside": 3},
            {**SMALL, "outside": 3, "row_dtype": torch.float16, "shard": 1, "shards": 3},
        ],
        gpu=CAPPED,
    ),
    Case("skewed", passes, {**RECIPE, "skewed": True}, tests=[{**SMALL, "tables": ((1000, 5), (3, 2))}], gpu=CAPPED),
    Case(
        "exact sums for small tables",
        passes,
        {
            **RECIPE,
            "tables": tuple((rows, hotness) for rows, hotness in TABLES if rows <= 50_000),
            "skewed": False,
            "rate": 2.0**-8,
            "adagrad": False,
            "exact": True,
        },
        tests=[
            {**SMALL, "outside": 3},
            {**SMALL, "row_dtype": torch.float16, "by_chance": True, "rate": 2.0**-15},
            {
                **SMALL,
                "row_dtype": torch.float16,
                "rate": 2.0**-15,
                "sum_dtype": torch.bfloat16,
                "shard": 3,
                "shards": 8,
            },
            {**SMALL, "write": False, "adagrad": True},
            # more tiles than programs, and a run with more tiles than are added at once
            {**SMALL, "samples": 70, "tables": ((1, 7), (9, 1))},
            # runs that begin and end at the edges of tiles, which have 16 keys
            {**SMALL, "samples": 1, "tables": ((1, 16), (1, 1), (1, 15), (1, 32), (1, 17), (1, 3), (1, 12))},
            {**SMALL, "samples": 0},
            {**SMALL, "tables": ((3, 1),), "shard": 5, "shards": 8},  # the shard has no rows
        ],
        gpu={
            "samples": 3000,
            "tables": ((5000, 3), (1, 1), (40, 2), (30_000, 40), (7, 9), (3, 50)),
            "width": 100,
            "row_dtype": torch.float16,
            "by_chance": True,
            "rate": 2.0**-15,
        },
        dtypes=(torch.bfloat16,),
        exact=True,
    ),
)
