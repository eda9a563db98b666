"""Planner of a run. ``auto`` is the greedy search of NVIDIA's submissions for DLRM-DCNv2 (rounds v3.0 to v5.1).

Shards are placed one by one, those with most lookups first, each on the cheapest rank that has memory left and no
shard of the same table. The cost of a rank is its lookups (memory traffic) plus one vector for each of its shards
(network traffic), weighted by the ratio of the bandwidths. A table that fits nowhere is split in two. After each
complete plan, the table with most lookups is split, and the search goes on. The plan whose most expensive rank is
cheapest wins; one candidate is the row-wise plan. Tables below a size are replicated.

``balanced`` improves this plan with another search and another cost: :mod:`common.recommendation.balanced_search`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.config.ranges import NotNegative, Positive
from common.distributed import job_store
from common.errors import ConfigError
from common.recommendation import balanced_search, plan_file
from common.recommendation.placement import Placement, row_wise, spread_over_nodes, table_wise
from common.recommendation.tables import Tables

ROUNDS = 20
"""Number of placements that are tried."""
GIGABYTE = 1e9
SEARCHES = ("auto", "balanced", "hier_auto")
"""Plans that need a search, whose result rank 0 sends to all ranks."""


@dataclass(frozen=True)
class PlannerSettings:
    """Options of the search; the defaults are those of the submissions on H200.

    Attributes:
        memory_gb: memory of a rank for tables, 10^9 bytes.
        bandwidth_ratio: memory bandwidth divided by network bandwidth between ranks (between nodes for ``hier_auto``).
        work_ratio: bytes that a lookup moves in memory divided by bytes that a shard's vector moves in the network.
        replicate_below_gb: tables with fewer bytes, including optimizer state, are replicated, 10^9 bytes.
    """

    memory_gb: Annotated[float, Positive] = 60.0
    bandwidth_ratio: Annotated[float, Positive] = 11.0
    work_ratio: Annotated[float, Positive] = 4.0
    replicate_below_gb: Annotated[float, NotNegative] = 0.008

    @property
    def shard_cost(self) -> float:
        """Cost of a shard, in lookups."""
        return self.bandwidth_ratio / self.work_ratio


def make_plan(
    tables: Tables, plan_name: str, ranks: int, ranks_per_node: int, row_bytes: int, settings: PlannerSettings
) -> Placement:
    """Return the plan of a run, the same on every rank.

    Args:
        plan_name: ``auto``, ``balanced``, ``hier_auto`` (tables to nodes, within a node over all its ranks),
            ``table_wise``, ``row_wise``, or the path of a YAML plan.
        ranks_per_node: number of ranks in a node; only used by ``hier_auto``.
        row_bytes: bytes of a row with its optimizer state.
        settings: options of the search. Its memory limits every plan.

    Raises:
        ConfigError: no plan fits the memory, or the file has none for these tables and ranks.
    """
    if ranks == 1 and plan_name in SEARCHES:
        plan = row_wise(tables, 1)  # there is nothing to plan or replicate
    elif plan_name == "table_wise":
        plan = table_wise(tables, ranks)
    elif plan_name == "row_wise":
        plan = row_wise(tables, ranks)
    elif plan_name == "auto":
        plan = automatic(tables, ranks, row_bytes, settings)
    elif plan_name == "balanced":
        plan = balanced(tables, ranks, row_bytes, settings)
    elif plan_name == "hier_auto":
        plan = automatic_over_nodes(tables, ranks, ranks_per_node, row_bytes, settings)
    else:
        plan = plan_file.read(Path(plan_name), tables, ranks)
    if plan_name in SEARCHES:
        # Equal costs keep the order of NumPy's default sort, as in the original. It depends on NumPy and the processor,
        # so rank 0 plans for all.
        text = job_store.from_rank_0("embedding plan", plan_file.to_text(plan))
        plan = plan_file.from_text(text, "the plan of rank 0", tables, ranks)
    plan.check_memory(row_bytes, int(settings.memory_gb * GIGABYTE))
    return plan


def automatic(tables: Tables, ranks: int, row_bytes: int, settings: PlannerSettings) -> Placement:
    """Return the result of the search over ranks."""
    return Placement(tables, ranks, _search(tables, ranks, row_bytes, settings, settings.memory_gb))


def balanced(tables: Tables, ranks: int, row_bytes: int, settings: PlannerSettings) -> Placement:
    """Return the plan of :func:`automatic`, with shards moved, split and merged to balance the ranks.

    Tables that ``auto`` replicates stay replicated.
    """
    greedy = automatic(tables, ranks, row_bytes, settings)
    replicated = greedy.replicated
    placed = [number for number in range(len(tables)) if number not in replicated]
    if not placed:
        return greedy
    capacity = int(settings.memory_gb * GIGABYTE) // row_bytes - sum(
        tables.tables[number].rows for number in replicated
    )
    # A vector in fp16 and its gradient take 4 bytes per element, an id 4 bytes. Every shard gets all ids of its table.
    search_tables = [
        balanced_search.SearchTable(table.rows, table.hotness, settings.shard_cost * (1 + table.hotness / tables.width))
        for table in (tables.tables[number] for number in placed)
    ]
    starts = [tuple(greedy.holders[number] for number in placed), (tuple(range(ranks)),) * len(placed)]
    found = dict(zip(placed, balanced_search.search(search_tables, ranks, capacity, starts), strict=True))
    return Placement(tables, ranks, tuple(found.get(number, ()) for number in range(len(tables))))


def automatic_over_nodes(
    tables: Tables, ranks: int, ranks_per_node: int, row_bytes: int, settings: PlannerSettings
) -> Placement:
    """Return the result of the search over nodes, each with the memory of its ranks; see :func:`make_plan`.

    Raises:
        ConfigError: there are not several complete nodes, or no plan fits the memory.
    """
    nodes, rest = divmod(ranks, ranks_per_node)
    if nodes < 2 or rest:
        raise ConfigError(f"plan=hier_auto: {ranks} ranks are not several nodes of {ranks_per_node}; use auto")
    found = _search(tables, nodes, row_bytes, settings, settings.memory_gb * ranks_per_node)
    return spread_over_nodes(tables, ranks_per_node, nodes, found)


def cost(plan: Placement, settings: PlannerSettings) -> float:
    """Return the cost that the search minimises: that of the most expensive rank, in lookups per sample."""
    ranks = range(plan.ranks)
    return max(plan.lookups_of(rank) + len(plan.shards_of(rank)) * settings.shard_cost for rank in ranks)


class _ShardOrder:
    """The shards in the order in which they are placed."""

    def __init__(self, tables: Tables, numbers: list[int]) -> None:
        self._hotness = {number: tables.tables[number].hotness for number in numbers}
        self.counts = dict.fromkeys(numbers, 1)
        self._table = np.array(numbers, dtype=np.int64)
        self._cost: NDArray[np.float64 | np.int64] = np.array(list(self._hotness.values()), dtype=np.int64)
        self.sort()

    @property
    def in_order(self) -> list[int]:
        """The table of each shard."""
        return [int(number) for number in self._table]

    def split(self, number: int) -> None:
        """Double the shards of a table."""
        others = self._table != number
        shards = self.counts[number] = 2 * self.counts[number]
        self._table = np.concatenate([self._table[others], np.full(shards, number)])
        self._cost = np.concatenate([self._cost[others], np.full(shards, self._hotness[number] / shards)])

    def sort(self) -> None:
        """Sort shards by falling number of lookups."""
        order = np.argsort(self._cost)[::-1]
        self._table, self._cost = self._table[order], self._cost[order]


def _search(
    tables: Tables, owners: int, row_bytes: int, settings: PlannerSettings, memory_gb: float
) -> tuple[tuple[int, ...], ...]:
    """Return for each table the owners (ranks or nodes) of its shards; empty if it is replicated."""
    size = [table.rows * row_bytes / GIGABYTE for table in tables.tables]
    everywhere = (sum(size) / owners, (tuple(range(owners)),) * len(tables))
    if everywhere[0] > memory_gb:
        raise ConfigError(
            f"plan: {int(sum(size) * GIGABYTE):,} bytes of tables do not fit {owners} times "
            f"{int(memory_gb * GIGABYTE):,} bytes; use more ranks"
        )
    fallback = (tables.lookups / owners + len(tables) * settings.shard_cost, everywhere[1])
    replicated = [number for number in range(len(tables)) if size[number] < settings.replicate_below_gb]
    capacity = memory_gb - sum(size[number] for number in replicated)
    if capacity < 0:
        raise ConfigError("plan: the tables below replicate_below_gb fill the memory; lower it")
    candidates = [fallback]
    order = _ShardOrder(tables, [number for number in range(len(tables)) if number not in replicated])
    for _ in range(ROUNDS):
        placed, stuck = _place(tables, owners, size, capacity, settings.shard_cost, order)
        if stuck is None:
            assert placed is not None
            candidates.append(placed)
            stuck = next((number for number in order.in_order if 2 * order.counts[number] <= owners), None)
        elif 2 * order.counts[stuck] > owners:
            break
        if stuck is not None:
            order.split(stuck)
        order.sort()
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _place(
    tables: Tables, owners: int, size: list[float], capacity: float, shard_cost: float, order: _ShardOrder
) -> tuple[tuple[float, tuple[tuple[int, ...], ...]] | None, int | None]:
    """Return a plan with its cost, and None; or None, and the table with a shard that fits nowhere."""
    costs, used = np.zeros(owners), np.zeros(owners)
    found: list[list[int]] = [[] for _ in range(len(tables))]
    for number in order.in_order:
        shards = order.counts[number]
        fitting = (
            int(owner)
            for owner in np.argsort(costs)
            if int(owner) not in found[number] and used[owner] + size[number] / shards <= capacity
        )
        owner = next(fitting, None)
        if owner is None:
            return None, number
        found[number].append(owner)
        used[owner] += size[number] / shards
        costs[owner] += tables.tables[number].hotness / shards + shard_cost
    return (float(costs.max()), tuple(tuple(sorted(ranks)) for ranks in found)), None
