"""Searches and games through the compiled code, with a network that is a function of the planes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.minigo import compiled as compiled_module
from benchmarks.minigo.cache import make_cache
from benchmarks.minigo.engine import MOVES, PASSES, make_rules
from benchmarks.minigo.features import PLANES, feature_bytes, symmetry_tables
from benchmarks.minigo.moves import play_move, start_game
from benchmarks.minigo.search import SearchSettings, collect, constants, incorporate, make_games, make_scratch
from benchmarks.minigo.selfplay import FinishedGame, SelfPlay
from benchmarks.minigo.tree import NONE, child_of, make_tree
from common.errors import ConfigError
from tests.benchmarks.minigo.sizes import search_settings

SMALL = search_settings(resign_disabled=1.0)
RESIGN = (-1.0, -1.0, 1.0)

Network = Callable[[NDArray[np.uint8], int], tuple[NDArray[np.float32], NDArray[np.float32]]]


def hashed(bits: NDArray[np.uint8], moves: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return policies and values that are a function of each row of planes."""
    policy, value = np.empty((len(bits), moves), np.float32), np.empty(len(bits), np.float32)
    for row, own in enumerate(bits):
        generator = np.random.default_rng(own)
        drawn = generator.random(moves) ** 4
        policy[row], value[row] = drawn / drawn.sum(), generator.uniform(-0.5, 0.5)
    return policy, value


def uniform(bits: NDArray[np.uint8], moves: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return equal probabilities of moves, and values 0."""
    return np.full((len(bits), moves), 1 / moves, np.float32), np.zeros(len(bits), np.float32)


def played(settings: SearchSettings, total: int, games: int = 4, value: float | None = None) -> list[FinishedGame]:
    play = SelfPlay(settings, games, seed=3, total=total)
    finished = []
    while len(bits := play.leaves()):
        policy, values = hashed(bits, settings.board**2 + 1)
        play.answer(policy, values if value is None else np.full_like(values, value))
        finished += play.take_finished()
    return sorted(finished + play.take_finished(), key=lambda game: game.number)


class Searched:
    """One game of the compiled functions, with access to its tree."""

    def __init__(self, settings: SearchSettings) -> None:
        size = settings.board
        self.settings, self.limits, self.rules = settings, constants(settings), make_rules(size)
        self.games, self.scratch = make_games(settings, 1, 1000), make_scratch(size, 1000)
        self.tree, self.tables = make_tree(size, 4000), symmetry_tables(size)
        self.cache = make_cache(size, 0)
        self.bits = np.zeros((settings.virtual_losses, feature_bytes(size)), np.uint8)
        start_game(self.games, self.tree, self.limits, 0, np.uint64(1), 0, RESIGN)

    @property
    def root(self) -> int:
        return int(self.games.root[0])

    def search(self, network: Network = hashed) -> list[int]:
        """Search until the target, and return the sizes of batches."""
        sizes = []
        while self.tree.visits[self.root] < self.games.target[0]:
            game, rows = collect(
                self.rules, self.games, self.tree, self.scratch, self.tables, self.limits, self.cache, self.bits, 0, 0
            )
            assert game == 1
            policy, value = network(self.bits[:rows], self.settings.board**2 + 1)
            incorporate(self.games, self.tree, self.tables, self.limits, self.cache, policy, value)
            assert not self.tree.virtual.any()
            sizes.append(rows)
        return sizes

    def play(self, move: int) -> int:
        return play_move(self.rules, self.games, self.tree, self.limits, 0, move)


def test_root_visits_grow_by_exactly_the_readouts():
    searched = Searched(dataclasses.replace(SMALL, fast_probability=0.0, readouts=50))
    sizes = searched.search()
    assert sizes[0] == 1  # the root
    assert max(sizes) == 4
    assert searched.tree.visits[searched.root] == 50
    searched.play(int(searched.tree.move[searched.tree.child[searched.root]]))
    inherited = int(searched.tree.visits[searched.root])
    searched.search()
    assert searched.tree.visits[searched.root] == inherited + 50


def test_a_full_move_clears_the_tree_and_repeats_inherited_visits():
    always_full = dataclasses.replace(SMALL, fast_probability=1e-9)
    searched = Searched(always_full)
    searched.search()
    child = searched.tree.child[searched.root]
    inherited = int(searched.tree.visits[child])
    searched.play(int(searched.tree.move[child]))
    assert inherited > 0
    assert searched.tree.visits[searched.root] == 0
    assert searched.games.target[0] == 40 + inherited
    searched.search()
    assert searched.tree.visits[searched.root] == 40 + inherited


def test_a_fast_move_keeps_the_tree_and_has_no_noise():
    searched = Searched(dataclasses.replace(SMALL, fast_probability=1.0))
    assert (searched.games.full[0], searched.games.noisy[0], searched.games.target[0]) == (1, 1, 40)
    searched.search()
    assert searched.games.noisy[0] == 0
    child = searched.tree.child[searched.root]
    inherited = int(searched.tree.visits[child])
    searched.play(int(searched.tree.move[child]))
    assert searched.tree.visits[searched.root] == inherited
    assert (searched.games.full[0], searched.games.noisy[0], searched.games.target[0]) == (0, 0, 12 + inherited)


def test_positions_after_the_end_are_scored_and_not_explored():
    searched = Searched(dataclasses.replace(SMALL, fast_probability=0.0, readouts=400))
    assert searched.play(25) == 0
    searched.search(uniform)
    second_pass = child_of(searched.tree, searched.root, 25)
    tree = searched.tree
    assert tree.visits[second_pass] > 1
    assert (tree.result[second_pass], tree.expanded[second_pass], tree.child[second_pass]) == (-1, 0, NONE)
    assert searched.games.leaves[0] < tree.visits[searched.root]
    assert searched.play(25) == -1  # white has won an empty board by komi


def test_games_depend_on_seed_and_number_only():
    first = played(SMALL, 6, games=4)
    assert [game.number for game in first] == list(range(6))
    assert len({game.bits.tobytes() for game in first}) == 6
    for other in (played(SMALL, 6, games=4), played(SMALL, 6, games=1)):
        for one, two in zip(first, other, strict=True):
            assert (one.outcome, one.moves, one.leaves) == (two.outcome, two.moves, two.leaves)
            assert np.array_equal(one.bits, two.bits)
            assert np.array_equal(one.pi, two.pi)


def test_records_are_full_moves_with_distributions():
    for game in played(SMALL, 6):
        assert 0 < len(game.bits) == len(game.pi) < game.moves
        assert game.pi.sum(1) == pytest.approx(np.ones(len(game.pi)), abs=1e-5)
        planes = np.unpackbits(game.bits, axis=1)[:, : PLANES * 25].reshape(-1, PLANES, 25)
        occupied = planes[:, 0] | planes[:, 1]
        assert not (game.pi[:, :25] * occupied).any()
        assert game.outcome in (1.0, -1.0)
    for game in played(dataclasses.replace(SMALL, fast_probability=0.0), 2):
        # Both passes that end a game on a pass-alive board are no records.
        assert len(game.bits) in (game.moves, game.moves - 1, game.moves - 2)


def test_a_colour_resigns_when_its_value_is_below_the_threshold():
    resigning = dataclasses.replace(SMALL, resign_high=-0.8, resign_low=-0.8, resign_disabled=0.0)
    games = played(resigning, 4, value=-1.0)
    assert all(game.resigned and game.outcome == -1.0 and game.moves == 0 for game in games)
    games = played(resigning, 4, value=1.0)
    assert all(game.resigned and game.outcome == 1.0 and game.moves == 1 for game in games)
    games = played(dataclasses.replace(resigning, resign_disabled=1.0), 4, value=-1.0)
    assert not any(game.resigned for game in games)


def test_a_game_ends_when_the_whole_board_is_pass_alive():
    searched = Searched(dataclasses.replace(SMALL, fast_probability=0.0))
    # .XO.O XXOOO XXO.O XXOOO .XOOO: white has two eyes only after the last stone, in the centre. Black then passes.
    black, white = [5, 1, 6, 11, 10, 16, 15, 21, 25, 25, 25, 25, 25], [2, 7, 17, 22, 4, 8, 9, 14, 19, 24, 23, 18, 12]
    results = [searched.play(move) for pair in zip(black, white, strict=True) for move in pair]
    assert results == [0] * 25 + [-1]
    assert searched.games.boards.state[0, MOVES] == 26 + 2
    assert searched.games.boards.state[0, PASSES] == 2


def test_passes_of_a_colour_count_until_its_next_stone_or_for_ever_once_they_restrict_the_opponent():
    searched = Searched(dataclasses.replace(SMALL, restrict_after=2))
    counts = []
    for move in (25, 12, 25, 13, 6, 25, 7, 8):
        searched.play(move)
        counts.append(tuple(searched.games.passes[0]))
    assert counts == [(1, 0), (1, 0), (2, 0), (2, 0), (2, 0), (2, 1), (2, 1), (2, 0)]


def test_a_compiled_function_without_numba_gives_one_clear_error(monkeypatch):
    monkeypatch.setattr(compiled_module, "numba", None)
    with pytest.raises(ConfigError, match=r"needs numba.*pip install 'mlperf-suite\[minigo\]'"):
        compiled_module.compiled(hashed)(np.zeros((1, 1), np.uint8), 2)


def test_the_cache_of_compiled_functions_needs_no_writable_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiled_module.cache_folder().is_relative_to(tmp_path / "cache")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(compiled_module.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    assert compiled_module.cache_folder().is_relative_to(tmp_path / "temporary")
    (parent,) = (tmp_path / "temporary").iterdir()
    parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        compiled_module.cache_folder()
    parent.rename(tmp_path / "private")
    (tmp_path / "private").chmod(0o700)
    parent.symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match="others can write"):
        compiled_module.cache_folder()
    monkeypatch.setattr(compiled_module.tempfile, "gettempdir", lambda: str(file))
    with pytest.raises(ConfigError, match="NUMBA_CACHE_DIR"):
        compiled_module.cache_folder()
