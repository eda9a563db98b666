"""The order of the rows within one shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CYCLE = 21
"""Packs of one cycle of the balanced order: the real set's are 10 of one, 1 of two and 10 of three sequences."""


def cycle_of(packs: Sequence[int], length: int = CYCLE) -> tuple[int, ...]:
    """How many packs of each number of sequences one cycle has: the shares of the whole set.

    Args:
        packs: packs of one, of two, of three … sequences in the whole set; not all zero.
        length: packs of a cycle; the largest remainders get what rounding down leaves.
    """
    exact = [count * length for count in packs]
    total = sum(packs)
    shares = [part // total for part in exact]
    by_remainder = sorted(range(len(packs)), key=lambda kind: (-(exact[kind] % total), kind))
    for kind in by_remainder[: length - sum(shares)]:
        shares[kind] += 1
    return tuple(shares)


def shuffled(rows: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Any order of ``rows`` rows."""
    return generator.permutation(rows)


def balanced(
    sequences_of_row: NDArray[np.integer], cycle: Sequence[int], generator: np.random.Generator
) -> NDArray[np.int64]:
    """An order in which all shards of a set have packs of equally many sequences at the same places.

    The rows are shuffled, sorted by their number of sequences and dealt in cycles. Where a kind runs out the others go
    on; kinds that have no share in a cycle come last. (NVIDIA's ``order_samples``, MLPerf Training v3.1.)

    Args:
        sequences_of_row: sequences of each row, from 1.
        cycle: packs of one, of two … sequences in a cycle.
        generator: of the shuffling.
    """
    order = generator.permutation(len(sequences_of_row))
    kinds = sequences_of_row[order].astype(np.int64) - 1
    turn_of = np.zeros(len(order), np.int64)
    for kind in np.unique(kinds):
        places = np.flatnonzero(kinds == kind)
        share = cycle[kind] if kind < len(cycle) else 0
        turn_of[places] = np.arange(len(places)) // share if share else len(order)
    return order[np.lexsort((kinds, turn_of))]
