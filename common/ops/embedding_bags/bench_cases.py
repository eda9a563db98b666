"""Embedding bags of DLRM-DCNv2: 26 tables of up to 5 million rows, 214 keys a sample, 128 values a row in fp32.

``python -m common.ops.embedding_bags.bench_cases`` prints every pass against the copy bandwidth of the same GPU, for
keys drawn alike and for skewed ones, and how many rows they have; ``--sweep`` times other tiles. Bytes are those that
must be moved: for ``forward`` each row that occurs read once, for ``update`` it and its state read and written once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from common.ops import embedding_bags
from common.ops.bench import cases, command
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep
from common.ops.embedding_bags.bags import AdagradRows, Bag, Bags
from common.ops.embedding_bags.reference import EmbeddingBags
from common.ops.random_bits.reference import words

SAMPLES = 6912

TABLES = (
    (5_000_000, 3), (39_060, 2), (17_295, 1), (7_424, 2), (20_265, 6), (3, 1), (7_122, 1), (1_543, 1), (63, 1),
    (5_000_000, 7), (3_067_956, 3), (405_282, 8), (10, 1), (2_209, 6), (11_938, 9), (155, 5), (4, 1), (976, 1), (14, 1),
    (5_000_000, 12), (5_000_000, 100), (5_000_000, 27), (590_152, 10), (12_973, 3), (108, 1), (36, 1),
)  # fmt: skip
"""Rows and hotness. Five tables of the benchmark have 40 million rows, more than one GPU holds."""

WIDTH = 128

EXPONENT = 1.05
"""Of the skewed keys: the k-th of a table has a probability proportional to k to the minus this."""

RATE, EPSILON = 0.004, 1e-8


def keys(samples: int, skewed: bool) -> Tensor:
    """int32 (samples, lookups): keys drawn alike, or a skewed first key of each bag, of which the others follow.

    The benchmark's multi-hot set is made so: a category's other keys are drawn alike once, so that they recur with it.
    """
    seed, columns = torch.zeros((), dtype=torch.int64, device=cases.DEVICE), []
    for number, (rows, hotness) in enumerate(TABLES):
        chance = torch.rand((samples, 1), dtype=torch.float64, device=cases.DEVICE)
        if not skewed:
            chance = torch.rand((samples, hotness), dtype=torch.float64, device=cases.DEVICE)
            columns.append((chance * rows).int())
            continue
        # inverse of the distribution's integral from 1 to rows + 1
        first = ((1 - chance * (1 - (rows + 1.0) ** (1 - EXPONENT))) ** (1 / (1 - EXPONENT))).int() - 1
        first = first.clamp(0, rows - 1)
        place = torch.arange(1, hotness, device=cases.DEVICE)
        others = words(first, seed, number * 128 + place).long() & 0xFFFFFFFF
        columns.append(torch.cat([first, (others % rows).int()], 1))
    return torch.cat(columns, 1)


def bags_of(tables: Sequence[tuple[int, int]]) -> Bags:
    """Tables of so many rows and of such a hotness, one behind the other."""
    bags: list[Bag] = []
    for rows, hotness in tables:
        column, base = (bags[-1].column + bags[-1].hotness, bags[-1].base + bags[-1].rows) if bags else (0, 0)
        bags.append(Bag(column, hotness, base, rows))
    return Bags(bags, cases.DEVICE)


def case(function: EmbeddingBags, skewed: bool, batch: int, dtype: torch.dtype) -> list[Pass]:
    """Forward pass, update by Adagrad, and the sort that it needs."""
    bags, ids = bags_of(TABLES), keys(batch, skewed)
    rows, state = (torch.zeros((bags.rows, WIDTH), device=cases.DEVICE) for _ in range(2))
    wide = torch.empty((batch, 1 + len(bags), WIDTH), dtype=dtype, device=cases.DEVICE)
    gradient = torch.randn((batch, 1 + len(bags), WIDTH), device=cases.DEVICE).to(dtype)[:, 1:]
    scalars = [torch.full((), value, device=cases.DEVICE) for value in (RATE, 1.0, True)]
    found = function.sort(ids, bags)
    count, distinct = len(found.row_M), len(found.row_M.unique())
    print(f"{count} {'skewed' if skewed else 'uniform'} keys of {distinct} rows, {distinct / count:.3f} of them")
    row_bytes, vectors = WIDTH * rows.element_size(), batch * len(bags) * WIDTH * wide.element_size()
    rule = AdagradRows(EPSILON)
    return [
        Pass(
            "forward", lambda: function.pool(rows, ids, bags, wide[:, 1:]), distinct * row_bytes + 4 * count + vectors
        ),
        Pass(
            "update",
            lambda: function.update(found, gradient, rows, state, rule, *scalars),
            4 * distinct * row_bytes + 8 * count + vectors,
        ),
        Pass("sort", lambda: function.sort(ids, bags), 12.0 * count),
    ]


def _build(skewed: bool, function: EmbeddingBags, batch: int, dtype: torch.dtype) -> list[Pass]:
    return case(function, skewed, batch, dtype)


def entries() -> list[Entry]:
    """Every implementation, with both kinds of keys."""
    found: list[Entry] = []
    for skewed, name in ((False, "uniform"), (True, "skewed")):
        build = functools.partial(_build, skewed)
        found += each(f"embedding_bags {name}", embedding_bags.EMBEDDING_BAGS, "triton", {}, build, calls=0)
    return found


def sweeps() -> dict[str, Sweep]:
    """Samples, lookups and warps of the forward pass; keys, warps, programs and stages of the update; then of the runs
    over several tiles partial sums, warps and programs."""
    from common.ops.embedding_bags import triton

    function = embedding_bags.EMBEDDING_BAGS.function("triton")
    pool = [
        (2, 4, 1),
        (1, 8, 1),
        (4, 2, 1),
        (4, 4, 1),
        (2, 8, 1),
        (8, 2, 1),
        (2, 4, 2),
        (4, 4, 2),
        (8, 4, 4),
        (4, 8, 4),
    ]
    update = list(itertools.product((16, 32), (4, 8), (2, 4, 16), (1, 2, 3)))
    update += list(itertools.product((64,), (8, 16), (1, 2, 8), (1, 3)))
    long_runs = list(itertools.product((8, 16, 32), (1, 2, 4), (8, 32)))
    found = {}
    for skewed, name in ((False, "uniform"), (True, "skewed")):
        build = functools.partial(case, function, skewed, SAMPLES)
        for key, tiles in (("pool", pool), ("update", update), ("long_runs", long_runs)):
            found[f"embedding_bags {name} {key}"] = Sweep(triton.TILES, key, tiles, build, key != "pool")
    return found


if __name__ == "__main__":
    command.main(
        command.Suite(
            "common.ops.embedding_bags.bench_cases", __doc__, entries, sweeps, batches=str(SAMPLES), dtype="float16"
        )
    )
