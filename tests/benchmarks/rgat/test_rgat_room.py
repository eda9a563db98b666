"""How much room blocks get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.rgat.block import BlockShape
from benchmarks.rgat.room import Filled, at_most, grown
from benchmarks.rgat.schema import Schema

SCHEMA = Schema.augmented(["paper", "author"], ["paper__cites__paper", "paper__written_by__author"], "paper")
BOUNDS = BlockShape(
    SCHEMA,
    ((4, 0), (40, 30), (400, 90)),
    ((60, 0, 30), (600, 120, 300)),
    ((36, 0, 26), (390, 100, 80)),
)


def flat(shape: BlockShape) -> list[int]:
    return [value for table in (shape.nodes, shape.edges, shape.rows) for line in table for value in line]


def test_room_is_the_mean_and_so_many_standard_deviations() -> None:
    random = np.random.default_rng(1)
    counts = random.integers(10, 30, size=(20, BOUNDS.counts))
    counts[:, -1] = 0
    filled = Filled(BOUNDS)
    for line in counts:
        filled.add(torch.from_numpy(line).int())
    wanted = np.ceil(counts.mean(0) + 3 * counts.std(0) - 1e-9)[:-1].astype(int)
    shape, position = filled.shape(3.0), 0
    for table, most in ((shape.nodes, BOUNDS.nodes), (shape.edges, BOUNDS.edges), (shape.rows, BOUNDS.rows)):
        highest = [0] * len(table[0])
        for hop, (line, bound) in enumerate(zip(table, most, strict=True)):
            for place, value in enumerate(line):
                own = BOUNDS.nodes[0][place] if table is shape.nodes and hop == 0 else wanted[position]
                highest[place] = max(highest[place], min(bound[place], own))
                assert value == highest[place]
                position += 1


def test_sums_of_ranks_add_up() -> None:
    one, other, both = Filled(BOUNDS), Filled(BOUNDS), Filled(BOUNDS)
    for value, half in ((3, one), (5, other), (11, other)):
        counts = torch.full((BOUNDS.counts,), value, dtype=torch.int32)
        half.add(counts)
        both.add(counts)
    one.sums += other.sums
    assert one.shape(2.0) == both.shape(2.0)
    assert both.mean().tolist() == pytest.approx([19 / 3] * BOUNDS.counts)


def test_whatever_can_be_filled_has_room_for_one() -> None:
    filled = Filled(BOUNDS)
    filled.add(torch.zeros(BOUNDS.counts, dtype=torch.int32))
    shape = filled.shape(5.0)
    assert shape.nodes == ((4, 0), (4, 1), (4, 1))
    assert shape.edges == shape.rows == ((1, 0, 1), (1, 1, 1))


def test_growing_ends_at_the_bounds() -> None:
    shape, sizes = at_most(BOUNDS, 4), []
    assert max(flat(shape)) == 4
    while shape != BOUNDS:
        sizes.append(sum(flat(shape)))
        shape = grown(shape, BOUNDS)
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 8  # 4, 8, ..., 512 and all
