"""Cache of the network's answers, which finds a position in any of its eight symmetries.

The key of a position has the smallest hash of its eight views. The view with this hash is the canonical one, in whose
orientation the entry has its policy. The network is only nearly equivariant, so an entry is a mean over the views that
the network has evaluated. A lookup of another view finds nothing, and the network's answer for it joins the mean.
(Source: MLCommons' reference of MiniGo, the inference cache of its self-play.)

A bucket has four entries, of which the least recently used one is replaced.

Shapes: S entries, A moves, P points of the board.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.compiled import compiled
from benchmarks.minigo.features import SYMMETRIES, symmetry_tables
from benchmarks.minigo.randomness import mixed

WAYS = 4
"""Entries of a bucket."""
MISSING = -1
"""Slot of a view that the cache does not have."""
HITS, CLOCK = range(2)
"""Entries of :attr:`Cache.counts`."""


class Cache(NamedTuple):
    """The arrays of the cache. Without entries it is off.

    Attributes:
        keys: uint64 (S,).
        views: uint8 (S,), one bit for each view that was evaluated; 0 for a free slot.
        used: int64 (S,), time of the last use.
        policy: float32 (S, A), mean probabilities in the canonical orientation.
        value: float32 (S,), mean values.
        counts: int64 (2,), number of lookups that found their view, and the time: the number of uses.
        factors: uint64 (8, P), factors of the point codes in the hash of each view.
        relation: int64 (8, 8), [c, v]: symmetry from the canonical view c to the evaluated view v; also its bit in
            ``views``.
    """

    keys: NDArray[np.uint64]
    views: NDArray[np.uint8]
    used: NDArray[np.int64]
    policy: NDArray[np.float32]
    value: NDArray[np.float32]
    counts: NDArray[np.int64]
    factors: NDArray[np.uint64]
    relation: NDArray[np.int64]


class CacheKey(NamedTuple):
    """Key of a position in the cache.

    Attributes:
        hash: the smallest hash of its views, mixed.
        canonical: symmetry of the view with this hash.
    """

    hash: np.uint64
    canonical: np.int64


def entry_bytes(board: int) -> int:
    """Return the bytes of an entry for a board of ``board`` lines."""
    return 8 + 1 + 8 + 4 * (board**2 + 1) + 4


def make_cache(board: int, memory: int) -> Cache:
    """Return an empty cache.

    Args:
        memory: largest size of all entries in bytes; 0 for a cache that is off.
    """
    buckets = memory // (WAYS * entry_bytes(board))
    entries = WAYS * (1 << buckets.bit_length() - 1) if buckets else 0
    tables = symmetry_tables(board)
    random = np.random.default_rng(0).integers(2**64, size=board**2, dtype=np.uint64)
    factors, relation = np.empty(tables.shape, np.uint64), np.empty((SYMMETRIES, SYMMETRIES), np.int64)
    for view, table in enumerate(tables):
        factors[view, table] = random
    for canonical, table in enumerate(tables):
        from_canonical = np.argsort(table)
        for view, other in enumerate(tables):
            relation[canonical, view] = np.flatnonzero((tables == from_canonical[other]).all(1))[0]
    return Cache(
        np.zeros(entries, np.uint64),
        np.zeros(entries, np.uint8),
        np.zeros(entries, np.int64),
        np.zeros((entries, board**2 + 1), np.float32),
        np.zeros(entries, np.float32),
        np.zeros(2, np.int64),
        factors,
        relation,
    )


@compiled
def key_of(cache: Cache, codes: NDArray[np.uint16]) -> CacheKey:
    """Return the key of a position from its point codes (P,)."""
    smallest, canonical = np.uint64(0), np.int64(0)
    for view in range(SYMMETRIES):
        total = np.uint64(0)
        for point in range(codes.size):
            total += codes[point] * cache.factors[view, point]
        if view == 0 or total < smallest:
            smallest, canonical = total, np.int64(view)
    return CacheKey(mixed(smallest), canonical)


@compiled
def find(cache: Cache, key: CacheKey, view: int | np.int64) -> int:
    """Return the slot of a position if its ``view`` (a symmetry) was evaluated, or MISSING. Counts if it is found."""
    slot = _slot_of(cache, key.hash)
    if slot == MISSING or not (cache.views[slot] >> cache.relation[key.canonical, view]) & 1:
        return MISSING
    cache.counts[HITS] += 1
    _use(cache, slot)
    return slot


@compiled
def store(
    cache: Cache,
    key: CacheKey,
    view: int | np.int64,
    tables: NDArray[np.int64],
    policy: NDArray[np.float32],
    value: float,
) -> int:
    """Add the network's answer for a view of a position to the mean of its entry, and return the slot of the entry.

    Args:
        policy: (A,), in the orientation of the view.
    """
    slot = _slot_of(cache, key.hash)
    if slot == MISSING:
        slot = _oldest(cache, key.hash)
        cache.keys[slot], cache.views[slot], cache.value[slot] = key.hash, 0, 0.0
        cache.policy[slot] = 0.0
    _use(cache, slot)
    bit = np.uint8(1) << np.uint8(cache.relation[key.canonical, view])
    if cache.views[slot] & bit:  # another game has evaluated it in the same batch
        return slot
    cache.views[slot] |= bit
    weight, points = np.float32(1.0) / np.float32(_count(cache.views[slot])), tables.shape[1]
    mean, back = cache.policy[slot], tables[cache.relation[key.canonical, view]]
    for point in range(points):
        mean[back[point]] += (policy[point] - mean[back[point]]) * weight
    mean[points] += (policy[points] - mean[points]) * weight
    cache.value[slot] += (np.float32(value) - cache.value[slot]) * weight
    return slot


def clear(cache: Cache) -> None:
    """Remove all entries, because the model has changed. The counts stay."""
    cache.views[:] = 0


@compiled
def _slot_of(cache: Cache, hashed: np.uint64) -> int:
    first = _bucket(cache, hashed)
    for slot in range(first, first + WAYS):
        if cache.keys[slot] == hashed and cache.views[slot] != 0:
            return slot
    return MISSING


@compiled
def _bucket(cache: Cache, hashed: np.uint64) -> int:
    return WAYS * int(hashed & np.uint64(cache.keys.size // WAYS - 1))


@compiled
def _oldest(cache: Cache, hashed: np.uint64) -> int:
    """Return a free slot of the bucket, or else the least recently used one."""
    first = _bucket(cache, hashed)
    oldest = first
    for slot in range(first, first + WAYS):
        if cache.views[slot] == 0:
            return slot
        if cache.used[slot] < cache.used[oldest]:
            oldest = slot
    return oldest


@compiled
def _use(cache: Cache, slot: int) -> None:
    cache.counts[CLOCK] += 1
    cache.used[slot] = cache.counts[CLOCK]


@compiled
def _count(bits: np.uint8) -> int:
    count = 0
    for bit in range(SYMMETRIES):
        count += int(bits >> np.uint8(bit)) & 1
    return count
