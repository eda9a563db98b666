"""Pack sequences into as few rows as possible, with at most three sequences per row.

Histogram packing (Krell et al., arXiv:2107.02027, section 3) computes how often to use each combination of lengths
that fills a row exactly. The size of this problem depends on the 512 lengths, not on the number of sequences. The paper
uses non-negative least squares, which takes minutes; we solve the linear program behind it to its optimum in a second:
minimise the rows so that every sequence has a slot of its length or longer. The solution is rounded down, and best fit
places the few hundred remaining sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_SEQUENCES = 3
_ROUNDING = 1e-6


@dataclass(frozen=True)
class PackingPlan:
    """Combinations of lengths that fill a row, and how often to use each.

    Attributes:
        combinations: int64 [W, 3], lengths of the slots of a row; 0 for unused slots.
        repeats: int64 [W], number of rows.
    """

    combinations: NDArray[np.int64]
    repeats: NDArray[np.int64]


@dataclass(frozen=True)
class Packs:
    """Assignment of sequences to packs.

    Attributes:
        slots: int32 [N], 3 * (index of the pack) + (slot in the pack) of each sequence.
        sizes: int8 [P], number of sequences in each pack, 1 to 3.
    """

    slots: NDArray[np.int32]
    sizes: NDArray[np.int8]

    @property
    def count(self) -> int:
        """Number of packs."""
        return len(self.sizes)


def pack(lengths: NDArray[np.integer], longest: int, seed: int) -> Packs:
    """Assign every sequence to a pack. The order of the packs and of sequences of equal length is random.

    Args:
        lengths: [N], tokens of each sequence, 1 to ``longest``.
        longest: tokens per row.
    """
    if len(lengths) == 0:
        return Packs(np.zeros(0, np.int32), np.zeros(0, np.int8))
    plan = plan_packs(np.bincount(lengths, minlength=longest + 1)[1:], longest)
    source = np.random.default_rng(seed)
    rows = source.permutation(int(plan.repeats.sum())).astype(np.int32)
    drawn = source.permutation(len(lengths)).astype(np.int32)
    queue = drawn[np.argsort(-lengths[drawn], kind="stable")]  # longest sequences first
    slots = np.full(len(lengths), -1, np.int32)
    starts = np.cumsum(plan.repeats) - plan.repeats
    done = 0
    for length in range(longest, 0, -1):
        for combination, slot in np.argwhere(plan.combinations == length).tolist():
            start = int(starts[combination])
            served = min(int(plan.repeats[combination]), len(queue) - done)
            slots[queue[done : done + served]] = rows[start : start + served] * MAX_SEQUENCES + slot
            done += served
    return _without_gaps(slots, len(rows))


def plan_packs(counts: NDArray[np.integer], longest: int) -> PackingPlan:
    """Return how often to use each combination so that all sequences have a slot.

    Assigning the longest sequences to the longest slots, in order, always fits. A plan may have unused slots.

    Args:
        counts: [longest], number of sequences of length 1, 2, … ``longest``.
        longest: tokens per row.
    """
    combinations = exact_combinations(longest)
    repeats = np.floor(_fewest_rows(combinations, counts, longest) + _ROUNDING).astype(np.int64)
    slots = np.zeros(longest + 1, np.int64)
    np.add.at(slots, combinations, repeats[:, None])
    left = np.asarray(counts, np.int64).copy()
    spare = 0
    for length in range(longest, 0, -1):  # slots that no sequence of this length needs serve shorter ones
        spare += int(slots[length])
        served = min(spare, int(left[length - 1]))
        left[length - 1] -= served
        spare -= served
    used = np.flatnonzero(repeats)
    rest = best_fit(left, longest)
    return PackingPlan(
        np.concatenate([combinations[used], rest.combinations]), np.concatenate([repeats[used], rest.repeats])
    )


def _fewest_rows(combinations: NDArray[np.int64], counts: NDArray[np.integer], longest: int) -> NDArray[np.float64]:
    """Return the fractional number of uses of each combination [W] with the smallest sum.

    For each length, one more variable counts the slots that are passed on to the next shorter length. The constraint
    of each length is: slots + slots received from above - slots passed on >= sequences.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    combination, slot = np.nonzero(combinations)
    each = np.arange(longest)
    values = np.concatenate([np.ones(len(combination)), -np.ones(longest), np.ones(longest - 1)])
    rows = np.concatenate([combinations[combination, slot] - 1, each, each[:-1]])
    columns = np.concatenate([combination, len(combinations) + each, len(combinations) + each[1:]])
    offered = coo_array((values, (rows, columns)), shape=(longest, len(combinations) + longest)).tocsc()
    cost = np.concatenate([np.ones(len(combinations)), np.zeros(longest)])
    solved = linprog(cost, A_ub=-offered, b_ub=-np.asarray(counts, np.float64), method="highs")
    if solved.status != 0:
        raise AssertionError(f"the linear program of packing always has an optimum; HiGHS: {solved.message}")
    return np.asarray(solved.x[: len(combinations)], np.float64)


def exact_combinations(longest: int) -> NDArray[np.int64]:
    """Return all multisets of one to three lengths with the sum ``longest``: [W, 3], 0 for unused slots."""
    one = [(longest, 0, 0)]
    two = [(a, longest - a, 0) for a in range(1, longest // 2 + 1)]
    three = [(a, b, longest - a - b) for a in range(1, longest // 3 + 1) for b in range(a, (longest - a) // 2 + 1)]
    return np.array(one + two + three, np.int64)


def best_fit(counts: NDArray[np.integer], longest: int) -> PackingPlan:
    """Return rows that each take the longest remaining sequence and up to two others that fill the row best."""
    left = np.asarray(counts, np.int64).copy()
    combinations: list[tuple[int, int, int]] = []
    repeats: list[int] = []
    while left.any():
        combination = _best_row(left, longest)
        lengths, times = np.unique([length for length in combination if length], return_counts=True)
        repeat = int((left[lengths - 1] // times).min())
        left[lengths - 1] -= times * repeat
        combinations.append(combination)
        repeats.append(repeat)
    return PackingPlan(np.array(combinations, np.int64).reshape(-1, MAX_SEQUENCES), np.array(repeats, np.int64))


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


def _without_gaps(slots: NDArray[np.int32], rows: int) -> Packs:
    """Remove empty rows and renumber the others from 0, in order."""
    sizes = np.bincount(slots // MAX_SEQUENCES, minlength=rows).astype(np.int8)
    number = (np.cumsum(sizes > 0) - 1).astype(np.int32)
    row, slot = np.divmod(slots, MAX_SEQUENCES)
    return Packs((number[row] * MAX_SEQUENCES + slot).astype(np.int32), sizes[sizes > 0])
