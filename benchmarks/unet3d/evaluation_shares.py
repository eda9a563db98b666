"""Distribution of the evaluation: volumes to groups of neighbouring ranks, and windows to the ranks of a group.

All windows cost the same, so work is counted in windows. Everything is a function of the numbers of windows, so all
ranks get the same result without communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST_SHARE = 8
"""Largest number of ranks that share a volume by default; the sums then stay within one node."""
SHARED_VOLUME = 0.25
"""Cost, in windows, of summing the logits of a shared volume over ranks: some hundred MB over NVLink."""


def shares_to_try(ranks: int, share: int | None) -> tuple[int, ...]:
    """Return the group sizes to choose from: ``share``, or powers of two that divide ``ranks``."""
    if share is not None:
        return (share,)
    powers = (2**power for power in range(LARGEST_SHARE.bit_length()))
    return tuple(size for size in powers if ranks % size == 0)


def deal_volumes(windows: Sequence[int], neighbourhoods: int) -> list[list[int]]:
    """Assign volumes to groups of ranks: the largest volume first, each to the group with the least work.

    Args:
        windows: number of windows of each volume.
        neighbourhoods: number of groups.

    Returns:
        For each group the indices of its volumes, largest first.
    """
    dealt: list[list[int]] = [[] for _ in range(neighbourhoods)]
    load = [0] * neighbourhoods
    for volume in sorted(range(len(windows)), key=lambda volume: -windows[volume]):
        idlest = load.index(min(load))
        dealt[idlest].append(volume)
        load[idlest] += windows[volume]
    return dealt


def deal_windows(windows: Sequence[int], ranks: int, rank: int) -> list[range]:
    """Assign windows to one rank of a group: every ``ranks``-th window in the sequence of all its volumes.

    Args:
        windows: number of windows of each volume of the group.
        ranks: ranks of the group; their numbers of windows differ by at most one.
        rank: index of this rank in the group.

    Returns:
        For each volume the windows of this rank, possibly none.
    """
    dealt, before = [], 0
    for count in windows:
        dealt.append(range((rank - before) % ranks, count, ranks))
        before += count
    return dealt


def choose_share(windows: Sequence[int], ranks: int, batch: int, shares: Sequence[int]) -> int:
    """Return the group size for which the slowest rank finishes first; the smallest of equal ones.

    Args:
        windows: number of windows of each volume.
        ranks: all ranks of the evaluation.
        batch: windows per forward pass; an incomplete pass takes as long as a full one.
        shares: group sizes to choose from, each a divisor of ``ranks``.
    """
    return min(sorted(shares), key=lambda share: _longest(windows, ranks // share, share, batch))


def _longest(windows: Sequence[int], neighbourhoods: int, share: int, batch: int) -> float:
    costs = []
    for volumes in deal_volumes(windows, neighbourhoods):
        of_busiest_rank = math.ceil(sum(windows[volume] for volume in volumes) / share)
        summing = SHARED_VOLUME * len(volumes) if share > 1 else 0.0
        costs.append(math.ceil(of_busiest_rank / batch) * batch + summing)
    return max(costs)
