"""The network's input as bits, written by compiled code.

``features.py`` describes the planes. The symmetry of the input is applied to one 13-bit number per point, before the
planes are separated.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.compiled import allocating
from benchmarks.minigo.engine import BLACK, CAPTURES, EMPTY, MOVES, TO_PLAY, Board
from benchmarks.minigo.features import PLANES

HISTORY = 4
"""Number of positions in the planes, the current one included."""

_PACK = np.uint64(0x8040201008040201)
"""Factor that collects the lowest bits of 8 bytes in the highest byte, the first byte's bit highest."""


@allocating
def point_codes(board: Board, recent: NDArray[np.int8], legal: NDArray[np.int8]) -> NDArray[np.uint16]:
    """Return the planes of a position as one number per point, (P,). Bit n belongs to plane n.

    Args:
        recent: (HISTORY, A), stones of the newest positions. The position after n moves is in row n % HISTORY, and
            rows of positions before the first one are zero.
        legal: (A,), as :func:`benchmarks.minigo.engine.legal_moves` writes it.
    """
    points = legal.size - 1
    colour = board.state[TO_PLAY]
    codes = np.empty(points, np.uint16)
    codes[:] = 256 if colour == BLACK else 0
    for age in range(HISTORY):
        stones = recent[(board.state[MOVES] - age) % HISTORY]
        for point in range(points):
            codes[point] |= np.uint16((stones[point] == colour) | (stones[point] == -colour) << 1) << (2 * age)
    for point in range(points):
        stone, liberties = board.stones[point] != EMPTY, min(board.liberties[board.chain[point]], 3)
        codes[point] |= (256 << liberties) * stone | (legal[point] == CAPTURES) << (PLANES - 1)
    return codes


@allocating
def write_planes(codes: NDArray[np.uint16], table: NDArray[np.int64], bits: NDArray[np.uint8]) -> None:
    """Write the packed planes of a position into ``bits`` (K,).

    Args:
        codes: (P,), see :func:`point_codes`.
        table: (P,), the point that each point's planes come from.
    """
    points = table.size
    rotated = codes[table]
    planes = np.empty((PLANES * points + 7) // 8 * 8, np.uint8)
    planes[PLANES * points :] = 0
    for plane in range(PLANES):
        for target in range(points):
            planes[plane * points + target] = (rotated[target] >> plane) & 1
    words = planes.view(np.uint64)
    for word in range(words.size):
        bits[word] = (words[word] * _PACK) >> np.uint64(56)
