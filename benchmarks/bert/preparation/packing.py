"""Which sequences share a row: at most three, in as few rows as there can be.

Histogram packing (Krell et al., arXiv:2107.02027, section 3): how often each way of filling a row exactly is used is
one small problem over the 512 lengths, whatever the number of sequences. The paper solves it by non-negative least
squares; here it is the linear program that it stands for, with its optimum, in a second instead of minutes: the fewest
rows whose places, each of which may also hold something shorter, are enough. It is rounded down, and the few hundred
sequences that then are left go where they fit best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_SEQUENCES = 3
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Plan:
    """Ways to fill rows, and how often to use each.

    Attributes:
        ways: int64 [W, 3], lengths of the places of a row; 0 where there is none.
        repeats: int64 [W].
    """

    ways: NDArray[np.int64]
    repeats: NDArray[np.int64]


@dataclass(frozen=True)
class Packs:
    """Where each sequence goes.

    Attributes:
        places: int32 [N], three times the number of the sequence's pack, plus its place there.
        sizes: int8 [P], sequences of each pack: 1 to 3.
    """

    places: NDArray[np.int32]
    sizes: NDArray[np.int8]

    @property
    def count(self) -> int:
        """Packs."""
        return len(self.sizes)


def pack(lengths: NDArray[np.integer], longest: int, seed: int) -> Packs:
    """Assign every sequence to a pack; sequences of one length and the packs' order are drawn at random.

    Args:
        lengths: [N], tokens of each sequence, 1 to ``longest``.
        longest: tokens of a row.
        seed: of the drawing.
    """
    if len(lengths) == 0:
        return Packs(np.zeros(0, np.int32), np.zeros(0, np.int8))
    plan = plan_packs(np.bincount(lengths, minlength=longest + 1)[1:], longest)
    source = np.random.default_rng(seed)
    rows = source.permutation(int(plan.repeats.sum())).astype(np.int32)
    drawn = source.permutation(len(lengths)).astype(np.int32)
    queue = drawn[np.argsort(-lengths[drawn], kind="stable")]  # the longest first
    places = np.full(len(lengths), -1, np.int32)
    starts = np.cumsum(plan.repeats) - plan.repeats
    done = 0
    for length in range(longest, 0, -1):
        for way, slot in np.argwhere(plan.ways == length).tolist():
            start = int(starts[way])
            served = min(int(plan.repeats[way]), len(queue) - done)
            places[queue[done : done + served]] = rows[start : start + served] * MAX_SEQUENCES + slot
            done += served
    return _without_gaps(places, len(rows))


def plan_packs(counts: NDArray[np.integer], longest: int) -> Plan:
    """How often to use each way of filling a row, so that all sequences have a place.

    The longest sequences fit the longest places, one after another; a plan may have more places than sequences.

    Args:
        counts: [longest], number of sequences of length 1, 2, … ``longest``.
        longest: tokens of a row.
    """
    ways = exact_ways(longest)
    repeats = np.floor(_fewest_rows(ways, counts, longest) + _ROUNDING).astype(np.int64)
    places = np.zeros(longest + 1, np.int64)
    np.add.at(places, ways, repeats[:, None])
    left = np.asarray(counts, np.int64).copy()
    spare = 0
    for length in range(longest, 0, -1):  # a place that no sequence of its length needs holds a shorter one
        spare += int(places[length])
        served = min(spare, int(left[length - 1]))
        left[length - 1] -= served
        spare -= served
    used = np.flatnonzero(repeats)
    rest = best_fit(left, longest)
    return Plan(np.concatenate([ways[used], rest.ways]), np.concatenate([repeats[used], rest.repeats]))


def _fewest_rows(ways: NDArray[np.int64], counts: NDArray[np.integer], longest: int) -> NDArray[np.float64]:
    """The fractional number of uses of each way [W] whose sum is least.

    Beside them, one variable for each length counts the places of this length that are handed to the length below;
    the constraint of a length: places, plus those handed to it, less those handed on, are at least its sequences.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    way, slot = np.nonzero(ways)
    each = np.arange(longest)
    values = np.concatenate([np.ones(len(way)), -np.ones(longest), np.ones(longest - 1)])
    rows = np.concatenate([ways[way, slot] - 1, each, each[:-1]])
    columns = np.concatenate([way, len(ways) + each, len(ways) + each[1:]])
    offered = coo_array((values, (rows, columns)), shape=(longest, len(ways) + longest)).tocsc()
    cost = np.concatenate([np.ones(len(ways)), np.zeros(longest)])
    solved = linprog(cost, A_ub=-offered, b_ub=-np.asarray(counts, np.float64), method="highs")
    if solved.status != 0:
        raise AssertionError(f"the linear program of packing always has an optimum; HiGHS: {solved.message}")
    return np.asarray(solved.x[: len(ways)], np.float64)


def exact_ways(longest: int) -> NDArray[np.int64]:
    """All multisets of one to three lengths that sum to ``longest``: [W, 3], 0 where there is none."""
    one = [(longest, 0, 0)]
    two = [(a, longest - a, 0) for a in range(1, longest // 2 + 1)]
    three = [(a, b, longest - a - b) for a in range(1, longest // 3 + 1) for b in range(a, (longest - a) // 2 + 1)]
    return np.array(one + two + three, np.int64)


def best_fit(counts: NDArray[np.integer], longest: int) -> Plan:
    """Rows for the last sequences: the longest that is left, and the one or two others that fill its row best."""
    left = np.asarray(counts, np.int64).copy()
    ways: list[tuple[int, int, int]] = []
    repeats: list[int] = []
    while left.any():
        way = _best_row(left, longest)
        lengths, times = np.unique([length for length in way if length], return_counts=True)
        repeat = int((left[lengths - 1] // times).min())
        left[lengths - 1] -= times * repeat
        ways.append(way)
        repeats.append(repeat)
    return Plan(np.array(ways, np.int64).reshape(-1, MAX_SEQUENCES), np.array(repeats, np.int64))


def _best_row(left: NDArray[np.int64], longest: int) -> tuple[int, int, int]:
    left = left.copy()
    first = int(np.flatnonzero(left)[-1]) + 1
    left[first - 1] -= 1
    space = longest - first
    best = (first, 0, 0)
    for second in (np.flatnonzero(left[:space]) + 1).tolist():
        left[second - 1] -= 1
        partners = np.flatnonzero(left[: space - second])
        third = int(partners[-1]) + 1 if len(partners) else 0
        left[second - 1] += 1
        if first + second + third > sum(best):
            best = (first, second, third)
    return best


def _without_gaps(places: NDArray[np.int32], rows: int) -> Packs:
    """Number the rows that hold a sequence from 0 on, in their order."""
    sizes = np.bincount(places // MAX_SEQUENCES, minlength=rows).astype(np.int8)
    number = (np.cumsum(sizes > 0) - 1).astype(np.int32)
    row, place = np.divmod(places, MAX_SEQUENCES)
    return Packs((number[row] * MAX_SEQUENCES + place).astype(np.int32), sizes[sizes > 0])
