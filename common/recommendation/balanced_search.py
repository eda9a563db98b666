"""Simulated annealing for a plan whose ranks finish together; ``embeddings.plan=balanced``.

An iteration reads rows, exchanges vectors, their gradients and ids, and updates rows, and every exchange waits for the
last rank. So a plan costs the lookups of the rank that has most of them, plus the bytes of the rank that sends most.
The greedy search of :mod:`common.recommendation.planner` weighs the sum of both on each rank instead, and splits tables
in a fixed order.

A change that makes the plan dearer is accepted with the probability exp(-increase / temperature), and the temperature
falls (Kirkpatrick, Gelatt, Vecchi: Optimization by Simulated Annealing, 1983). Plans beyond the memory are passed
through, at a price, because large tables leave no room to move one before another.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

Holders = tuple[tuple[int, ...], ...]
"""The ranks that hold the shards of each table."""

STARTS = 8
STEPS = 10_000
"""Changes of a plan that are tried from each start."""
HOTTEST, COLDEST = 0.1, 0.0005
"""The temperature falls from the first to the second, as fractions of the starting plan's cost."""
SPREAD = 0.05
"""What the imbalance among all ranks counts beside the largest, which alone would not guide a search."""


@dataclass(frozen=True)
class SearchTable:
    """A table whose shards are placed.

    Attributes:
        rows: of the table.
        lookups: rows that a sample reads.
        sent: what a shard sends and receives for a sample, in lookups that take as long.
    """

    rows: int
    lookups: int
    sent: float

    def shard_rows(self, shards: int) -> int:
        """Rows of the largest shard."""
        return -(-self.rows // shards)


def search(tables: Sequence[SearchTable], ranks: int, capacity: int, starts: Sequence[Holders]) -> Holders:
    """The cheapest plan that was found; deterministic, and never dearer than a start that fits.

    Args:
        tables: the tables to place.
        ranks: that may hold shards.
        capacity: rows of a rank.
        starts: plans to start from. The first is returned where no plan that fits into the memory was found.
    """
    generator = random.Random(0)
    states = [_State(tables, ranks, capacity, start) for start in starts]
    cheapest, best = min(
        ((state.cost_if_it_fits, start) for state, start in zip(states, starts, strict=True)), key=_cost
    )
    for number in range(STARTS):
        state = _State(tables, ranks, capacity, starts[number % len(starts)])
        cheapest, best = min((cheapest, best), _anneal(state, generator), key=_cost)
    return best


def _cost(found: tuple[float, Holders]) -> float:
    return found[0]


class _State:
    """A plan that is changed shard by shard, and may exceed the memory meanwhile."""

    def __init__(self, tables: Sequence[SearchTable], ranks: int, capacity: int, holders: Holders) -> None:
        self.tables, self.capacity = tables, capacity
        self.lookups, self.sent, self.rows = [0.0] * ranks, [0.0] * ranks, [0] * ranks
        self.holders: list[tuple[int, ...]] = [() for _ in tables]
        for number, held in enumerate(holders):
            self.place(number, held)

    def place(self, number: int, ranks: tuple[int, ...]) -> None:
        """Move the shards of a table to ``ranks``."""
        table = self.tables[number]
        for held, sign in ((self.holders[number], -1), (ranks, 1)):
            for rank in held:
                self.lookups[rank] += sign * table.lookups / len(held)
                self.sent[rank] += sign * table.sent
                self.rows[rank] += sign * table.shard_rows(len(held))
        self.holders[number] = ranks

    @property
    def cost(self) -> float:
        """Of the plan, in lookups of a sample."""
        return max(self.lookups) + max(self.sent)

    @property
    def excess(self) -> int:
        """Rows beyond the memory, over all ranks."""
        return sum(max(0, rows - self.capacity) for rows in self.rows)

    @property
    def cost_if_it_fits(self) -> float:
        """Infinite where the plan exceeds the memory."""
        return math.inf if self.excess else self.cost

    def energy(self, excess_cost: float) -> float:
        """What annealing minimises; a row beyond the memory costs ``excess_cost``."""
        spread = sum(value * value for value in self.lookups) + sum(value * value for value in self.sent)
        return self.cost + SPREAD * math.sqrt(spread / len(self.lookups)) + excess_cost * self.excess


def _anneal(state: _State, generator: random.Random) -> tuple[float, Holders]:
    """The cheapest plan that is met from ``state`` on, with its cost."""
    cheapest, best = state.cost_if_it_fits, tuple(state.holders)
    unit = state.cost
    excess_cost = unit / state.capacity
    energy = state.energy(excess_cost)
    for step in range(STEPS):
        temperature = unit * HOTTEST * (COLDEST / HOTTEST) ** (step / STEPS)
        before = _change(state, generator)
        after = state.energy(excess_cost)
        if after > energy and generator.random() >= math.exp((energy - after) / temperature):
            for number, held in before:
                state.place(number, held)
            continue
        energy = after
        if state.cost < cheapest - 1e-9 and state.excess == 0:
            cheapest, best = state.cost, tuple(state.holders)
    return cheapest, best


def _change(state: _State, generator: random.Random) -> list[tuple[int, tuple[int, ...]]]:
    """Move, add, remove or swap a shard at random; returns the tables that changed with their holders before."""
    ranks, number = len(state.rows), generator.randrange(len(state.tables))
    held = state.holders[number]
    other, to = generator.randrange(len(state.tables)), generator.randrange(ranks)
    out = generator.choice(held)
    before = [(number, held)]
    if to in held:
        if len(held) > 1:
            state.place(number, tuple(rank for rank in held if rank != to))
    elif generator.random() < 0.25:
        state.place(number, tuple(sorted((*held, to))))
    else:
        state.place(number, tuple(sorted((*(rank for rank in held if rank != out), to))))
        partner = state.holders[other]
        if other != number and to in partner and out not in partner and generator.random() < 0.5:
            before.append((other, partner))
            state.place(other, tuple(sorted((*(rank for rank in partner if rank != to), out))))
    return before
