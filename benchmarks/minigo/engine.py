"""The rules of Go: boards, chains, liberties, captures and repetitions.

A board is a set of arrays over points, so that compiled functions can step hundreds of games. Points are numbered row
by row. The number of points P is also the number of the pass move, and the index of the border in arrays of P + 1
entries. A chain is a circular list of its stones. Its head, one of its stones, has its exact number of liberties.

A move may not repeat any earlier position of the game (positional superko), may not be suicide, and may not retake a ko
at once. Positions are compared by 64-bit Zobrist hashes of the stones.

Shapes: P points, A = P + 1 moves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.compiled import compiled
from benchmarks.minigo.positions import Positions, contains

BLACK, WHITE, EMPTY, BORDER = 1, -1, 0, 2

TO_PLAY, KO, PASSES, MOVES = 0, 1, 2, 3
"""Entries of :attr:`Board.state`: colour to move; forbidden point of a ko or -1; passes in a row; moves and passes."""

STATE = 4

CAPTURES = 2
"""Value of a legal move that captures; other legal moves have 1, and illegal moves 0."""


class Rules(NamedTuple):
    """Constants of a board size, and the scratch memory of one thread.

    Attributes:
        neighbours: uint16 (P, 4), the adjacent points; P where the border is.
        keys: uint64 (2, P), the hashes of black and white stones.
        marks: int64 (A,), the time at which a search last visited each point.
        clock: int64 (1,), the number of searches.
        gives: int8 (A,), effect of each point on a move next to it: 1 if the new stone gets a liberty, CAPTURES if the
            move captures the chain at this point, else 0.
    """

    neighbours: NDArray[np.uint16]
    keys: NDArray[np.uint64]
    marks: NDArray[np.int64]
    clock: NDArray[np.int64]
    gives: NDArray[np.int8]


class Board(NamedTuple):
    """One position. Points are unsigned: numba tests each signed index for a negative value.

    Attributes:
        stones: int8 (A,), BLACK, WHITE or EMPTY; the last entry is BORDER.
        chain: uint16 (A,), the head of each stone's chain.
        following: uint16 (A,), the next stone of the chain.
        liberties: int16 (A,), valid at heads.
        state: int64 (STATE,).
        key: uint64 (1,), hash of the stones.
    """

    stones: NDArray[np.int8]
    chain: NDArray[np.uint16]
    following: NDArray[np.uint16]
    liberties: NDArray[np.int16]
    state: NDArray[np.int64]
    key: NDArray[np.uint64]


def make_rules(size: int) -> Rules:
    """Return the constants of a board with ``size`` lines. Hashes are the same in every process."""
    points = size * size
    neighbours = np.full((points, 4), points, np.uint16)
    for point in range(points):
        row, column = divmod(point, size)
        near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        inside = [r * size + c for r, c in near if 0 <= r < size and 0 <= c < size]
        neighbours[point, : len(inside)] = inside
    keys = np.random.Generator(np.random.PCG64(size)).integers(1, 2**64, (2, points), np.uint64)
    return Rules(neighbours, keys, np.zeros(points + 1, np.int64), np.zeros(1, np.int64), np.zeros(points + 1, np.int8))


def make_board(size: int) -> Board:
    """Return the arrays of an empty board."""
    moves = size * size + 1
    board = Board(
        stones=np.zeros(moves, np.int8),
        chain=np.zeros(moves, np.uint16),
        following=np.zeros(moves, np.uint16),
        liberties=np.zeros(moves, np.int16),
        state=np.zeros(STATE, np.int64),
        key=np.zeros(1, np.uint64),
    )
    clear_board(board)
    return board


@compiled
def clear_board(board: Board) -> None:
    """Remove all stones; black is to move."""
    board.stones[:] = EMPTY
    board.stones[-1] = BORDER
    board.state[:] = 0
    board.state[TO_PLAY] = BLACK
    board.state[KO] = -1
    board.key[0] = 0


@compiled
def copy_board(target: Board, source: Board) -> None:
    """Copy a position into the arrays of another."""
    # Loops over one pair of arrays are vectorised, and faster than numba's assignment of slices.
    for move in range(source.stones.size):
        target.stones[move] = source.stones[move]
    for move in range(source.stones.size):
        target.chain[move] = source.chain[move]
    for move in range(source.stones.size):
        target.following[move] = source.following[move]
    for move in range(source.stones.size):
        target.liberties[move] = source.liberties[move]
    for entry in range(STATE):
        target.state[entry] = source.state[entry]
    target.key[0] = source.key[0]


@compiled
def play(rules: Rules, board: Board, move: int) -> None:
    """Play a legal move or pass. The caller adds the new position to those of the game."""
    state = board.state
    if move == rules.neighbours.shape[0]:
        state[PASSES] += 1
        state[KO] = -1
    else:
        state[PASSES] = 0
        state[KO] = _place(rules, board, move, state[TO_PLAY])
    state[TO_PLAY] = -state[TO_PLAY]
    state[MOVES] += 1


@compiled
def _place(rules: Rules, board: Board, point: int, colour: int) -> int:
    """Put a stone, remove captured chains, and return the point of a ko or -1."""
    captured, taken = 0, -1
    for i in range(4):
        other = rules.neighbours[point, i]
        if board.stones[other] == -colour and _first_of_chain(rules, board, point, i):
            head = board.chain[other]
            board.liberties[head] -= 1
            if board.liberties[head] == 0:
                captured += _remove(rules, board, head)
                taken = other
    board.stones[point] = colour
    board.key[0] ^= rules.keys[0 if colour == BLACK else 1, point]
    joined = _join(rules, board, point, colour)
    single = board.following[point] == point
    board.liberties[joined] = _count_liberties(rules, board, point)
    if captured == 1 and single and board.liberties[joined] == 1:
        return taken
    return -1


@compiled
def _first_of_chain(rules: Rules, board: Board, point: int | np.int64, index: int) -> bool:
    """Return whether no earlier neighbour of ``point`` belongs to the chain of its neighbour ``index``."""
    here = rules.neighbours[point, index]
    for i in range(index):
        other = rules.neighbours[point, i]
        if board.stones[other] == board.stones[here] and board.chain[other] == board.chain[here]:
            return False
    return True


@compiled
def _remove(rules: Rules, board: Board, head: int) -> int:
    """Remove a chain, give its points to adjacent chains as liberties, and return its number of stones."""
    colour, count, point = board.stones[head], 0, np.int64(head)
    while True:
        board.stones[point] = EMPTY
        board.key[0] ^= rules.keys[0 if colour == BLACK else 1, point]
        for i in range(4):
            other = rules.neighbours[point, i]
            if board.stones[other] == -colour and _first_of_chain(rules, board, point, i):
                board.liberties[board.chain[other]] += 1
        count += 1
        point = board.following[point]
        if point == head:
            return count


@compiled
def _join(rules: Rules, board: Board, point: int, colour: int) -> int:
    """Connect a new stone with the adjacent chains of its colour, and return the head of the joined chain."""
    board.chain[point] = point
    board.following[point] = point
    for i in range(4):
        other = rules.neighbours[point, i]
        if board.stones[other] != colour or board.chain[other] == board.chain[point]:
            continue
        # The stones so far take the other chain's head. At the first neighbour this is only the new stone.
        stone, head = point, board.chain[other]
        while True:
            board.chain[stone] = head
            stone = board.following[stone]
            if stone == point:
                break
        board.following[point], board.following[other] = board.following[other], board.following[point]
    return board.chain[point]


@compiled
def _count_liberties(rules: Rules, board: Board, start: int) -> int:
    """Return the number of empty points beside the chain of ``start``."""
    rules.clock[0] += 1
    now, count, point = rules.clock[0], 0, start
    while True:
        for i in range(4):
            other = rules.neighbours[point, i]
            if board.stones[other] == EMPTY and rules.marks[other] != now:
                rules.marks[other] = now
                count += 1
        point = board.following[point]
        if point == start:
            return count


@compiled
def legal_moves(rules: Rules, board: Board, past: Positions, legal: NDArray[np.int8]) -> None:
    """Write 0, 1 or CAPTURES for every move into ``legal`` (A,). Pass is always legal.

    Args:
        past: all positions of the game, the current one included.
    """
    # Without branches that depend on the stones, because a core predicts these badly.
    points = rules.neighbours.shape[0]
    colour = board.state[TO_PLAY]
    for point in range(points):
        stone, liberties = board.stones[point] * colour, board.liberties[board.chain[point]]
        own, atari = (stone > 0) & (liberties > 1), (stone < 0) & (liberties == 1)
        rules.gives[point] = (stone == EMPTY) | own | CAPTURES * atari
    for point in range(points):
        given = (
            rules.gives[rules.neighbours[point, 0]]
            | rules.gives[rules.neighbours[point, 1]]
            | rules.gives[rules.neighbours[point, 2]]
            | rules.gives[rules.neighbours[point, 3]]
        )
        legal[point] = min(given, CAPTURES) * (board.stones[point] == EMPTY)
    if board.state[KO] >= 0:
        legal[board.state[KO]] = 0
    for point in range(points):
        key = board.key[0] ^ rules.keys[0 if colour == BLACK else 1, point]
        if legal[point] == CAPTURES:
            key ^= _key_of_captured(rules, board, point, colour)
        if contains(past, key):
            legal[point] = 0
    legal[points] = 1


@compiled
def _key_of_captured(rules: Rules, board: Board, point: int, colour: int) -> np.uint64:
    """Return the hash of the stones that a move captures."""
    key = np.uint64(0)
    for i in range(4):
        other = rules.neighbours[point, i]
        if board.stones[other] != -colour or board.liberties[board.chain[other]] != 1:
            continue
        if _first_of_chain(rules, board, point, i):
            stone = other
            while True:
                key ^= rules.keys[1 if colour == BLACK else 0, stone]
                stone = board.following[stone]
                if stone == other:
                    break
    return key
