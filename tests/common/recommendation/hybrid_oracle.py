"""The rows that a rank requests from others, computed by dictionaries and loops."""

from __future__ import annotations

from dataclasses import dataclass

from common.recommendation.placement import Placement


@dataclass(frozen=True)
class Requests:
    """Requests of a rank.

    Attributes:
        frequent: for each sample and id of a hybrid table, its place among the frequent rows of its table, or None.
        rows: likewise, the rank that has the rare row, and the row of that rank's store; None where it is not rare.
        overflows: for each hybrid table, the shards with more different rows than slots.
    """

    frequent: list[list[int | None]]
    rows: list[list[tuple[int, int] | None]]
    overflows: list[int]


def requests_of(plan: Placement, samples: list[list[int]]) -> Requests:
    """Return the requests of a rank with these samples."""
    first: dict[tuple[int, int], int] = {}  # rank and table to the first row of its shard
    for rank in range(plan.ranks):
        row = 0
        for hybrid in plan.hybrids:
            if rank in hybrid.ranks:
                first[rank, hybrid.table] = row
                row += len(range(hybrid.ranks.index(rank), plan.tables.tables[hybrid.table].rows, len(hybrid.ranks)))
    frequent: list[list[int | None]] = []
    rows: list[list[tuple[int, int] | None]] = []
    different: dict[tuple[int, int], set[int]] = {}
    for sample in samples:
        frequent.append([])
        rows.append([])
        for hybrid in plan.hybrids:
            table = plan.tables.tables[hybrid.table]
            begin = sum(other.hotness for other in plan.tables.tables[: hybrid.table])
            for key in sample[begin : begin + table.hotness]:
                place = hybrid.frequent.index(key) if key in hybrid.frequent else None
                frequent[-1].append(place)
                if place is not None or not 0 <= key < table.rows:
                    rows[-1].append(None)
                    continue
                rank = hybrid.ranks[key % len(hybrid.ranks)]
                rows[-1].append((rank, first[rank, hybrid.table] + key // len(hybrid.ranks)))
                different.setdefault((hybrid.table, rank), set()).add(key)
    overflows = []
    for hybrid in plan.hybrids:
        slots = hybrid.slots * -(-len(samples) // hybrid.samples)
        overflows.append(sum(table == hybrid.table and len(keys) > slots for (table, _), keys in different.items()))
    return Requests(frequent, rows, overflows)
