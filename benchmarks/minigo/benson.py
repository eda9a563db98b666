"""Unconditionally alive chains (Benson's algorithm), and the score.

For one colour, a region is a connected set of points without stones of this colour. A region is vital to a chain if all
its empty points are liberties of the chain. Chains with fewer than two vital regions are removed, then regions beside
removed chains, until nothing changes. The chains that are left cannot be captured even if their owner always passes.
They and their vital regions are pass-alive.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.compiled import allocating, compiled
from benchmarks.minigo.engine import BLACK, EMPTY, WHITE, Board, Rules


@allocating
def pass_alive(rules: Rules, board: Board, owner: NDArray[np.int8]) -> None:
    """Write the colour of which each point is pass-alive, or EMPTY, into ``owner`` (P,)."""
    owner[:] = EMPTY
    for colour in (BLACK, WHITE):
        _pass_alive_of(rules, board, colour, owner)


@allocating
def _pass_alive_of(rules: Rules, board: Board, colour: int, owner: NDArray[np.int8]) -> None:
    points = rules.neighbours.shape[0]
    stones, chain = board.stones, board.chain
    region = np.empty(points, np.int16)  # of each point without a stone of this colour
    outside = stones != colour
    order = np.empty(points, np.int16)  # these points, region by region
    begins = np.zeros(points + 1, np.int16)  # where each region begins in `order`
    regions = 0
    for start in range(points):
        if outside[start]:
            begin = begins[regions]
            end = begin + _fill(rules, outside, start, order[begin:])
            for point in order[begin:end]:
                region[point] = regions
            regions += 1
            begins[regions] = end
    vital = np.full((regions, 4), -1, np.int16)  # chains to which each region is vital
    for number in range(regions):
        _find_vital(rules, board, colour, order[begins[number] : begins[number + 1]], vital[number])
    alive = np.ones(points, np.bool_)  # by head
    kept = np.ones(regions, np.bool_)
    count = np.empty(points, np.int16)
    changed = True
    while changed:
        changed = False
        count[:] = 0
        for number in range(regions):
            for i in range(4):
                if kept[number] and vital[number, i] >= 0:
                    count[vital[number, i]] += 1
        for point in range(points):
            if stones[point] == colour and chain[point] == point and alive[point] and count[point] < 2:
                alive[point] = False
                changed = True
        for number in range(regions):
            if kept[number] and _touches_dead(rules, board, colour, order[begins[number] : begins[number + 1]], alive):
                kept[number] = False
                changed = True
    for point in range(points):
        if stones[point] == colour:
            if alive[chain[point]]:
                owner[point] = colour
        elif kept[region[point]] and vital[region[point], 0] >= 0:
            owner[point] = colour


@compiled
def _fill(rules: Rules, inside: NDArray[np.bool_], start: int, found: NDArray[np.int16]) -> int:
    """Write the points that are connected to ``start`` into ``found``, and return how many there are.

    Args:
        inside: (A,), whether a point may be connected; becomes False at the points that are found.
    """
    found[0] = start
    inside[start] = False
    inside[-1] = False  # the border
    count, read = 1, 0
    while read < count:
        for i in range(4):
            other = rules.neighbours[found[read], i]
            if inside[other]:
                inside[other] = False
                found[count] = other
                count += 1
        read += 1
    return count


@compiled
def _find_vital(rules: Rules, board: Board, colour: int, members: NDArray[np.int16], vital: NDArray[np.int16]) -> None:
    """Write the heads of the chains to which a region is vital into ``vital`` (4,)."""
    # Every such chain is beside the region's first empty point.
    count, first = 0, 0
    while first < members.size and board.stones[members[first]] != EMPTY:
        first += 1
    if first == members.size:
        return
    for i in range(4):
        beside = rules.neighbours[members[first], i]
        if board.stones[beside] != colour:
            continue
        head = board.chain[beside]
        known = False
        for j in range(count):
            known |= vital[j] == head
        if known:
            continue
        everywhere = True
        for k in range(first + 1, members.size):
            if board.stones[members[k]] == EMPTY and not _beside(rules, board, colour, members[k], head):
                everywhere = False
                break
        if everywhere:
            vital[count] = head
            count += 1


@compiled
def _beside(rules: Rules, board: Board, colour: int, point: int, head: int) -> bool:
    for i in range(4):
        other = rules.neighbours[point, i]
        if board.stones[other] == colour and board.chain[other] == head:
            return True
    return False


@compiled
def _touches_dead(
    rules: Rules, board: Board, colour: int, members: NDArray[np.int16], alive: NDArray[np.bool_]
) -> bool:
    for point in members:
        for i in range(4):
            other = rules.neighbours[point, i]
            if board.stones[other] == colour and not alive[board.chain[other]]:
                return True
    return False


@allocating
def score(rules: Rules, board: Board, komi: float) -> float:
    """Return black's area minus white's area and komi.

    Pass-alive points count for their owner. Other stones count for their colour. Another region of empty points counts
    for a colour if all stones next to it have this colour (Tromp-Taylor).
    """
    points = rules.neighbours.shape[0]
    owner = np.empty(points, np.int8)
    pass_alive(rules, board, owner)
    empty = board.stones == EMPTY
    members = np.empty(points, np.int16)
    total = 0
    for point in range(points):
        if owner[point] != EMPTY:
            total += owner[point]
        elif board.stones[point] != EMPTY:
            total += board.stones[point]
        elif empty[point]:
            count = _fill(rules, empty, point, members)
            seen_black, seen_white = False, False
            for k in range(count):
                for i in range(4):
                    stone = board.stones[rules.neighbours[members[k], i]]
                    seen_black |= stone == BLACK
                    seen_white |= stone == WHITE
            if seen_black != seen_white:
                total += count if seen_black else -count
    return total - komi
