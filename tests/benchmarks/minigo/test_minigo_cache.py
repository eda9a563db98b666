"""The cache of the network's answers: views, means, replacement, and games with and without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.minigo.cache import (
    CLOCK,
    HITS,
    MISSING,
    WAYS,
    Cache,
    CacheKey,
    clear,
    entry_bytes,
    find,
    key_of,
    make_cache,
    store,
)
from benchmarks.minigo.features import PLANES, SYMMETRIES, symmetry_tables
from benchmarks.minigo.search import SearchSettings
from benchmarks.minigo.searches import Searches
from benchmarks.minigo.selfplay import FinishedGame, SelfPlay
from tests.benchmarks.minigo.sizes import search_settings

BOARD = 5
TABLES = symmetry_tables(BOARD)
SETTINGS = search_settings(board=BOARD, readouts=24, fast_readouts=8, virtual_losses=1, noise_alpha=0.3)

Network = Callable[[NDArray[np.uint8]], tuple[NDArray[np.float32], NDArray[np.float32]]]


def codes(seed: int) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(2**PLANES, size=BOARD**2, dtype=np.uint16)


def answers(seed: int, count: int = SYMMETRIES) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    return random.random((count, BOARD**2 + 1), np.float32), 2 * random.random(count, np.float32) - 1


def small_cache(entries: int = 64) -> Cache:
    return make_cache(BOARD, entries * entry_bytes(BOARD))


def keyed(cache: Cache, position: NDArray[np.uint16]) -> CacheKey:
    """Return the key of a position. Compiled functions return hashes as Python's integers, but do not accept them."""
    hashed, canonical = key_of(cache, position)
    return CacheKey(np.uint64(hashed), np.int64(canonical))


def rotated(policy: NDArray[np.float32], view: int) -> NDArray[np.float32]:
    """Return a distribution over the moves of a position as the network gives it for a view of this position."""
    return np.append(policy[TABLES[view]], policy[-1])


def test_all_views_of_a_position_have_one_key_and_one_canonical_view():
    cache, position = small_cache(), codes(0)
    keys = [keyed(cache, position[table]) for table in TABLES]
    assert len({key.hash for key in keys}) == 1
    canonical = {position[table][TABLES[key.canonical]].tobytes() for table, key in zip(TABLES, keys, strict=True)}
    assert len(canonical) == 1
    assert len({keyed(cache, codes(seed)).hash for seed in range(1000)}) == 1000


def test_positions_that_differ_in_one_point_have_different_keys():
    cache, position = small_cache(), np.zeros(BOARD**2, np.uint16)
    keys = {int(keyed(cache, position).hash)}
    for point in (0, 1, 2, 6, 7, 12):  # one of each orbit of the symmetries
        for plane in range(PLANES):
            changed = position.copy()
            changed[point] = 1 << plane
            keys.add(int(keyed(cache, changed).hash))
    assert len(keys) == 1 + 6 * PLANES


def test_an_evaluated_view_is_found_in_the_orientation_of_every_other_position():
    """The answer for view 3 of a position is found for the same picture as a view of a rotated position."""
    cache, position, (policy, value) = small_cache(), codes(1), answers(1)
    key = keyed(cache, position)
    assert find(cache, key, 3) == MISSING
    store(cache, key, 3, TABLES, rotated(policy[0], 3), value[0])
    for turned in range(SYMMETRIES):
        other = position[TABLES[turned]]
        same = next(view for view in range(SYMMETRIES) if np.array_equal(other[TABLES[view]], position[TABLES[3]]))
        there = keyed(cache, other)
        for view in range(SYMMETRIES):
            slot = find(cache, there, view)
            assert (slot != MISSING) == (view == same)
        slot = find(cache, there, same)
        found = np.empty(BOARD**2 + 1, np.float32)
        found[TABLES[there.canonical]], found[-1] = cache.policy[slot, :-1], cache.policy[slot, -1]
        np.testing.assert_array_equal(found, rotated(policy[0], turned))
        assert cache.value[slot] == value[0]
    assert cache.counts[HITS] == 2 * SYMMETRIES


def test_an_entry_is_the_mean_over_the_evaluated_views():
    cache, key = small_cache(), keyed(small_cache(), codes(2))
    policies, values = answers(2)
    for count, view in enumerate((4, 0, 7, 2, 1, 6, 5, 3), 1):
        slot = store(cache, key, view, TABLES, rotated(policies[count - 1], view), values[count - 1])
        mean = policies[:count].astype(np.float64).mean(0)
        np.testing.assert_allclose(cache.policy[slot], rotated(mean.astype(np.float32), key.canonical), rtol=2e-6)
        np.testing.assert_allclose(cache.value[slot], values[:count].astype(np.float64).mean(), rtol=2e-5, atol=1e-7)


def test_a_view_that_two_games_have_evaluated_counts_once():
    cache, key = small_cache(), keyed(small_cache(), codes(3))
    policies, values = answers(3)
    slot = store(cache, key, 2, TABLES, policies[0], values[0])
    before = cache.policy[slot].copy()
    assert store(cache, key, 2, TABLES, policies[1], values[1]) == slot
    np.testing.assert_array_equal(cache.policy[slot], before)
    assert cache.value[slot] == values[0]


def test_the_least_recently_used_entry_of_a_full_bucket_is_rekeyed():
    cache, (policies, values) = small_cache(WAYS), answers(4)
    keys = [CacheKey(np.uint64(7 + number), np.int64(0)) for number in range(WAYS + 1)]
    for key in keys[:WAYS]:
        store(cache, key, 0, TABLES, policies[0], values[0])
    assert find(cache, keys[0], 0) != MISSING
    store(cache, keys[WAYS], 0, TABLES, policies[1], values[1])
    assert [find(cache, key, 0) != MISSING for key in keys] == [True, False, True, True, True]
    assert cache.counts[CLOCK] > 0


def test_a_cleared_cache_has_nothing():
    cache, key, (policies, values) = small_cache(), keyed(small_cache(), codes(5)), answers(5)
    store(cache, key, 0, TABLES, policies[0], values[0])
    clear(cache)
    assert find(cache, key, 0) == MISSING
    slot = store(cache, key, 1, TABLES, policies[1], values[1])
    assert cache.value[slot] == values[1]


@pytest.mark.parametrize("memory", [0, 1, 5_000, 100_000, 2_000_000])
def test_the_entries_fit_into_the_memory(memory):
    cache = make_cache(BOARD, memory)
    arrays = cache.keys, cache.views, cache.used, cache.policy, cache.value
    assert memory / 2 - WAYS * entry_bytes(BOARD) <= sum(array.nbytes for array in arrays) <= memory


def equivariant(bits: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return answers that are exactly equal for all views: small integers, divided by their sum."""
    planes_BCP = np.unpackbits(bits, axis=1)[:, : PLANES * BOARD**2].reshape(len(bits), PLANES, -1).astype(np.int64)
    weights_BP = 1 + np.tensordot(planes_BCP, np.array([0, 0, 3, 1, 4, 1, 5, 9, 0, 2, 6, 5, 8]), (1, 0))
    weights_BA = np.concatenate([weights_BP, np.full((len(bits), 1), 2)], 1)
    side_B = 2 * planes_BCP[:, 8, 0] - 1
    value_B = side_B * (planes_BCP[:, 0].sum(1) - planes_BCP[:, 1].sum(1)) / np.float32(BOARD**2)
    return (weights_BA / weights_BA.sum(1, keepdims=True)).astype(np.float32), value_B.astype(np.float32)


def played(settings: SearchSettings, cache: Cache | None, network: Network = equivariant) -> list[FinishedGame]:
    play, finished = SelfPlay(settings, 4, seed=3, total=8, cache=cache), []
    while len(bits := play.leaves()):
        play.answer(*network(bits))
        finished += play.take_finished()
    return sorted(finished + play.take_finished(), key=lambda game: game.number)


def test_games_with_a_cache_equal_those_without_it():
    """With one leaf of a game in a batch, an answer from the cache comes when the network's would come."""
    cache = make_cache(BOARD, 1 << 24)
    without, with_cache = played(SETTINGS, None), played(SETTINGS, cache)
    assert len(without) == len(with_cache) == 8
    for one, other in zip(without, with_cache, strict=True):
        np.testing.assert_array_equal(one.bits, other.bits)
        np.testing.assert_array_equal(one.pi, other.pi)
        assert (one.outcome, one.moves) == (other.outcome, other.moves)
    evaluated = sum(game.leaves for game in with_cache)
    assert evaluated + cache.counts[HITS] == sum(game.leaves for game in without)
    assert cache.counts[HITS] > evaluated / 20


def test_games_with_several_leaves_in_a_batch_make_exactly_their_readouts(monkeypatch):
    """Also while answers are replaced in the cache, whose buckets are all full."""
    finish, visits = Searches.finish_moves, []

    def noted(searches: Searches) -> int:
        games, tree = searches.games, searches._tree
        assert not tree.virtual.any()
        beyond = (tree.visits[games.root] - games.target)[games.active != 0]
        visits.extend(beyond[beyond >= 0])
        return finish(searches)

    monkeypatch.setattr(Searches, "finish_moves", noted)
    settings = dataclasses.replace(SETTINGS, virtual_losses=4, fast_probability=0.0)
    cache = make_cache(BOARD, 20_000)  # so small that entries are replaced
    games = played(settings, cache)
    assert len(visits) >= sum(len(game.pi) for game in games) > 0
    assert not any(visits)
    assert np.all(cache.views)
    assert cache.counts[HITS] > 0
