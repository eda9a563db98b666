"""Order of the rows within one shard: shuffled or balanced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CYCLE = 21
"""Packs per cycle of the balanced order. In the real set, 10 have one sequence, 1 has two and 10 have three."""


def cycle_of(packs: Sequence[int], length: int = CYCLE) -> tuple[int, ...]:
    """Return the number of packs of one, two, three … sequences in one cycle, in proportion to the whole set.

    Args:
        packs: numbers of packs of one, two, three … sequences in the whole set; not all zero.
        length: packs per cycle. Shares are rounded down; the largest remainders get the rest.
    """
    exact = [count * length for count in packs]
    total = sum(packs)
    shares = [part // total for part in exact]
    by_remainder = sorted(range(len(packs)), key=lambda kind: (-(exact[kind] % total), kind))
    for kind in by_remainder[: length - sum(shares)]:
        shares[kind] += 1
    return tuple(shares)


def shuffled(rows: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return a random permutation of ``rows`` rows."""
    return generator.permutation(rows)


def balanced(
    sequences_of_row: NDArray[np.integer], cycle: Sequence[int], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return an order in which packs at the same position have equally many sequences in all shards.

    Each cycle takes its share of randomly chosen rows of each number of sequences. If rows of one number run out,
    the cycles continue without them; rows whose number has no share come last. (``order_samples`` of NVIDIA's
    submission to MLPerf Training v3.1 does the same.)

    Args:
        sequences_of_row: number of sequences in each row, at least 1.
        cycle: numbers of packs of one, two … sequences in a cycle.
    """
    order = generator.permutation(len(sequences_of_row))
    kinds = sequences_of_row[order].astype(np.int64) - 1
    turn_of = np.zeros(len(order), np.int64)
    for kind in np.unique(kinds):
        places = np.flatnonzero(kinds == kind)
        share = cycle[kind] if kind < len(cycle) else 0
        turn_of[places] = np.arange(len(places)) // share if share else len(order)
    return order[np.lexsort((kinds, turn_of))]
