"""Which rank evaluates which windows: volumes to neighbourhoods of ranks, windows to the ranks of a neighbourhood.

Work is counted in windows, which all cost the same. Everything is a function of the numbers of windows, so all ranks
come to the same result without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST_SHARE = 8
"""Ranks that share a volume at most where nothing is asked for: the sums then stay inside of one node."""
SHARED_VOLUME = 0.25
"""What it costs to sum the logits of a shared volume over its ranks, in windows: some hundred MB over NVLink."""


def shares_to_try(ranks: int, share: int | None) -> tuple[int, ...]:
    """Sizes of neighbourhoods to choose from: ``share``, or the powers of two that divide ``ranks``."""
    if share is not None:
        return (share,)
    powers = (2**power for power in range(LARGEST_SHARE.bit_length()))
    return tuple(size for size in powers if ranks % size == 0)


def deal_volumes(windows: Sequence[int], neighbourhoods: int) -> list[list[int]]:
    """Volumes of each neighbourhood: the longest first, each to the neighbourhood that has least to do.

    Args:
        windows: of each volume.
        neighbourhoods: how many there are.

    Returns:
        For each neighbourhood the indices of its volumes, longest first.
    """
    dealt: list[list[int]] = [[] for _ in range(neighbourhoods)]
    load = [0] * neighbourhoods
    for volume in sorted(range(len(windows)), key=lambda volume: -windows[volume]):
        idlest = load.index(min(load))
        dealt[idlest].append(volume)
        load[idlest] += windows[volume]
    return dealt


def deal_windows(windows: Sequence[int], ranks: int, rank: int) -> list[range]:
    """Windows of one rank of a neighbourhood: every ``ranks``-th of all its volumes' windows in a row.

    Args:
        windows: of each volume of the neighbourhood, in its order.
        ranks: of the neighbourhood; their loads differ by one window at most.
        rank: this one's place in it.

    Returns:
        For each volume the windows of this rank, possibly none.
    """
    dealt, before = [], 0
    for count in windows:
        dealt.append(range((rank - before) % ranks, count, ranks))
        before += count
    return dealt


def choose_share(windows: Sequence[int], ranks: int, batch: int, shares: Sequence[int]) -> int:
    """The size of neighbourhoods with which the busiest rank is done first; of equal ones the smallest.

    Args:
        windows: of each volume.
        ranks: of the evaluation.
        batch: windows of one forward pass; the last pass of a rank takes as long as the others.
        shares: sizes to choose from, each of which divides ``ranks``.
    """
    return min(sorted(shares), key=lambda share: _longest(windows, ranks // share, share, batch))


def _longest(windows: Sequence[int], neighbourhoods: int, share: int, batch: int) -> float:
    costs = []
    for volumes in deal_volumes(windows, neighbourhoods):
        of_busiest_rank = math.ceil(sum(windows[volume] for volume in volumes) / share)
        summing = SHARED_VOLUME * len(volumes) if share > 1 else 0.0
        costs.append(math.ceil(of_busiest_rank / batch) * batch + summing)
    return max(costs)
