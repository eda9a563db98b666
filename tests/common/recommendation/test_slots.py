"""Slots of rare rows: each different one once, with the rank that has it, counted where there are too few."""

from __future__ import annotations

import pytest
import torch
from hybrid_oracle import requests_of

from common.recommendation.placement import Hybrid, Placement, TableShard
from common.recommendation.slots import SlotFinder
from common.recommendation.tables import Table, Tables
from tests.capturable import Capturable

TABLES = Tables((Table("a", 30, 3), Table("b", 12, 2), Table("c", 50, 1), Table("d", 2, 2)), 4)
CPU = torch.device("cpu")
BATCH = 9


def plan_of(slots: int, samples: int = BATCH) -> Placement:
    """Three hybrid tables beside one that is not; one of them with fewer rows than ranks."""
    hybrids = (
        Hybrid(0, (7, 3, 29, 0), (0, 1, 2), slots, samples),
        Hybrid(2, (), (2,), slots, samples),
        Hybrid(3, (1,), (2, 0, 1), slots, samples),
    )
    return Placement(TABLES, 3, ((), (0,), (), ()), hybrids)


def ids_of(seed: int, batch: int = BATCH) -> torch.Tensor:
    """Ids of which some occur several times, and some are no rows."""
    generator = torch.Generator().manual_seed(seed)
    columns = [
        torch.randint(-1, table.rows + 1, (batch, table.hotness), generator=generator) for table in TABLES.tables
    ]
    ids_BL = torch.cat(columns, 1).int()
    ids_BL[:3, 0] = 11
    return ids_BL


@pytest.mark.parametrize("seed", range(4))
def test_every_rare_row_is_asked_for_once_and_of_the_rank_that_has_it(seed):
    plan, ids_BL = plan_of(slots=40), ids_of(seed)
    finder, expected = SlotFinder(plan, CPU), requests_of(plan, ids_BL.tolist())
    found, slots = finder.find(ids_BL), finder.slots(BATCH)
    assert found.overflow_H.tolist() == expected.overflows == [0, 0, 0]
    rank_of = [rank for rank, count in enumerate(slots.counts) for _ in range(count)]
    requested = [(rank, row) for rank, row in zip(rank_of, found.requested_S.tolist(), strict=True) if row >= 0]
    assert len(requested) == len(set(requested))
    assert set(requested) == {row for sample in expected.rows for row in sample if row is not None}
    for slot_K, sample in zip(found.slot_BK.tolist(), expected.rows, strict=True):
        for slot, row in zip(slot_K, sample, strict=True):
            assert (slot < 0) if row is None else ((rank_of[slot], int(found.requested_S[slot])) == row)


def test_frequent_rows_take_the_places_of_their_ids():
    plan, ids_BL = plan_of(slots=40), ids_of(5)
    columns = [0, 1, 2, 5, 6, 7]
    local_BL = SlotFinder(plan, CPU).find(ids_BL).local_BL
    expected = [
        [-1 if place is None else place for place in sample] for sample in requests_of(plan, ids_BL.tolist()).frequent
    ]
    assert local_BL[:, columns].tolist() == expected
    assert torch.equal(local_BL[:, 3:5], ids_BL[:, 3:5])


def test_keys_are_sorted_by_slot_with_the_table_that_they_are_of():
    plan, ids_BL = plan_of(slots=40), ids_of(1)
    found = SlotFinder(plan, CPU).find(ids_BL)
    ours, table_K = int(found.keys.ours), [0, 0, 0, 1, 2, 2]
    expected = sorted(
        (slot, sample, number)
        for sample, slot_K in enumerate(found.slot_BK.tolist())
        for number, slot in enumerate(slot_K)
        if slot >= 0
    )
    assert ours == len(expected)
    assert found.keys.row_M[:ours].tolist() == [slot for slot, _, _ in expected]
    assert found.keys.source_M[:ours].tolist() == [sample * 3 + table_K[number] for _, sample, number in expected]
    assert (found.keys.row_M[ours:] == found.keys.rows).all()


@pytest.mark.parametrize("slots", range(1, 12))
def test_too_few_slots_are_counted_for_the_table_that_lacks_them(slots):
    plan = plan_of(slots)
    counts = []
    for seed in range(6):
        ids_BL = ids_of(seed)
        counts.append(SlotFinder(plan, CPU).find(ids_BL).overflow_H.tolist())
        assert counts[-1] == requests_of(plan, ids_BL.tolist()).overflows
    if slots in (1, 11):
        assert any(any(count) for count in counts) == (slots == 1)


def test_a_larger_batch_has_as_many_times_the_slots_as_parts():
    plan = plan_of(slots=4, samples=5)
    assert [SlotFinder(plan, CPU).slots(batch).total for batch in (5, 6)] == [4 * 3 + 4 + 2, 8 * 3 + 6 + 2]
    assert plan.hybrids[0].capacity(TableShard(0, 0, 3), 1, TABLES) == 3  # as many ids as there are
    assert plan.hybrids[0].capacity(TableShard(0, 0, 3), 1000, TABLES) == 10  # as many rows as there are
    for seed in range(5):
        ids_BL = ids_of(seed, 23)
        assert SlotFinder(plan, CPU).find(ids_BL).overflow_H.tolist() == requests_of(plan, ids_BL.tolist()).overflows


def test_slots_are_found_without_waiting_for_the_device():
    finder, ids_BL = SlotFinder(plan_of(slots=2), CPU), ids_of(0)
    finder.find(ids_BL)
    with Capturable():
        finder.find(ids_BL)
