"""Simulated annealing for a plan whose ranks finish together; ``embeddings.plan=balanced``.

An iteration reads rows, exchanges vectors, gradients and ids, and updates rows. Every exchange waits for the slowest
rank. So the cost of a plan is the lookups of the rank with most lookups plus the bytes of the rank that sends most.
The greedy search of :mod:`common.recommendation.planner` instead uses the sum of both on each rank, and splits tables
in a fixed order.

A change that increases the cost is accepted with the probability exp(-increase / temperature), and the temperature
falls (Kirkpatrick, Gelatt, Vecchi: Optimization by Simulated Annealing, 1983). The search may pass through plans that
exceed the memory, at a cost, because otherwise large tables could not be moved one after the other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

Holders = tuple[tuple[int, ...], ...]
"""Ranks that hold the shards of each table."""

STARTS = 8
STEPS = 10_000
"""Changes that are tried from each start."""
HOTTEST, COLDEST = 0.1, 0.0005
"""First and last temperature, as fractions of the starting plan's cost."""
SPREAD = 0.05
"""Weight of the imbalance among all ranks beside the maximum, which alone would not guide a search."""


@dataclass(frozen=True)
class SearchTable:
    """A table whose shards are placed.

    Attributes:
        lookups: rows that a sample reads.
        sent: cost of what a shard sends and receives for a sample, in lookups of equal duration.
    """

    rows: int
    lookups: int
    sent: float

    def shard_rows(self, shards: int) -> int:
        """Return the rows of the largest shard."""
        return -(-self.rows // shards)


def search(tables: Sequence[SearchTable], ranks: int, capacity: int, starts: Sequence[Holders]) -> Holders:
    """Return the cheapest plan found. It is deterministic and never costs more than a start that fits.

    Args:
        ranks: number of ranks that may hold shards.
        capacity: rows that fit on a rank.
        starts: plans to start from. The first is returned if no plan was found that fits the memory.
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
    """A plan that is changed shard by shard and may temporarily exceed the memory."""

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
        """Cost of the plan, in lookups per sample."""
        return max(self.lookups) + max(self.sent)

    @property
    def excess(self) -> int:
        """Rows beyond the capacity, over all ranks."""
        return sum(max(0, rows - self.capacity) for rows in self.rows)

    @property
    def cost_if_it_fits(self) -> float:
        """Cost of the plan; infinite if it exceeds the memory."""
        return math.inf if self.excess else self.cost

    def energy(self, excess_cost: float) -> float:
        """Return the quantity that annealing minimises; a row beyond the capacity costs ``excess_cost``."""
        spread = sum(value * value for value in self.lookups) + sum(value * value for value in self.sent)
        return self.cost + SPREAD * math.sqrt(spread / len(self.lookups)) + excess_cost * self.excess


def _anneal(state: _State, generator: random.Random) -> tuple[float, Holders]:
    """Return the cheapest plan met from ``state`` on, after its cost."""
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
    """Move, add, remove or swap a shard at random; return the changed tables with their previous holders."""
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
