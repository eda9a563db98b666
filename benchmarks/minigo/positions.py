"""A set of the positions of one game, for positional superko: a hash table of 64-bit hashes with linear probing.

One bit per slot says whether the slot is taken. These bits stay in the cache of a core, and nearly all look-ups need
only them, while the hashes of many games do not fit.

Shapes: G games, T slots (a power of two, at least 64).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.compiled import allocating, compiled


class Positions(NamedTuple):
    """The set.

    Attributes:
        keys: uint64 (T,), hashes.
        taken: uint64 (T / 64,), one bit per slot.
    """

    keys: NDArray[np.uint64]
    taken: NDArray[np.uint64]


def make_positions(capacity: int, games: int) -> Positions:
    """Return empty sets with arrays of a row per game. A set of ``capacity`` positions is at most half full."""
    slots = max(64, 1 << (2 * capacity - 1).bit_length())
    return Positions(np.zeros((games, slots), np.uint64), np.zeros((games, slots // 64), np.uint64))


@allocating
def of_game(positions: Positions, game: int) -> Positions:
    """Return the set of one game; the arrays are views."""
    return Positions(positions.keys[game], positions.taken[game])


@compiled
def _is_taken(positions: Positions, slot: np.int64) -> bool:
    return (positions.taken[slot >> 6] >> np.uint64(slot & 63)) & np.uint64(1) != np.uint64(0)


@compiled
def contains(positions: Positions, key: np.uint64) -> bool:
    """Return whether a set has ``key``."""
    mask = positions.keys.size - 1
    slot = np.int64(key & np.uint64(mask))
    while _is_taken(positions, slot):
        if positions.keys[slot] == key:
            return True
        slot = (slot + 1) & mask
    return False


@compiled
def insert(positions: Positions, key: np.uint64) -> np.int64:
    """Add ``key``, which the set does not have, and return its slot."""
    mask = positions.keys.size - 1
    slot = np.int64(key & np.uint64(mask))
    while _is_taken(positions, slot):
        slot = (slot + 1) & mask
    positions.keys[slot] = key
    positions.taken[slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)
    return slot


@compiled
def remove(positions: Positions, slot: np.int64) -> None:
    """Undo :func:`insert`. Slots have to be removed in the opposite order of their insertion."""
    positions.taken[slot >> 6] &= ~(np.uint64(1) << np.uint64(slot & 63))


@compiled
def clear(positions: Positions) -> None:
    """Remove all positions."""
    positions.taken[:] = 0


def enlarged_positions(positions: Positions, capacity: int) -> Positions:
    """Return the same sets with arrays for ``capacity`` positions."""
    games = len(positions.keys)
    larger = make_positions(capacity, games)
    for game in range(games):
        taken = np.unpackbits(positions.taken[game].view(np.uint8), bitorder="little").astype(bool)
        for key in positions.keys[game][taken]:
            insert(of_game(larger, game), key)
    return larger
