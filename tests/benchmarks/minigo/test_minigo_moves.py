"""Moves that follow from finished searches: the choice, the distribution, and pass-alive points, from roots by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.minigo.engine import MOVES, TO_PLAY
from benchmarks.minigo.searches import Searches
from benchmarks.minigo.tree import new_node
from tests.benchmarks.minigo.test_minigo_games import SMALL

SQUARE_ROOT = dataclasses.replace(SMALL, fast_probability=0.0, target_pruning=False, visit_exponent=0.5)
"""An exponent whose effect is larger than that of 0.98. On 5x5, moves 0 and 1 are chosen at random."""
PRUNED = dataclasses.replace(SQUARE_ROOT, target_pruning=True)
PASS, COUNT = 25, 600


def started(settings, games: int = 1) -> Searches:
    searches = Searches(settings, games, seed=1)
    for game in range(games):
        searches.start(game, game)
    return searches


def searched(searches: Searches, visits: dict[int, int], quality: dict[int, float] | None = None) -> None:
    """Give the root of every game children with these visits, Q for the colour to move (default 0) and equal priors."""
    tree, games = searches._tree, searches.games
    for game, root in enumerate(games.root.tolist()):
        side = int(games.boards.state[game, TO_PLAY])
        for move, count in visits.items():
            child = new_node(tree, root, move, -side, 0.2, 0.0)
            tree.visits[child], tree.total[child] = count, side * (quality or {}).get(move, 0.0) * (1 + count)
        tree.visits[root] = games.target[game] = 1 + sum(visits.values())


def shares(searches: Searches) -> np.ndarray:
    return np.bincount(searches.moved, minlength=PASS + 1) / len(searches.moved)


@pytest.mark.parametrize("played", [0, 1])
def test_early_moves_are_random_points_in_proportion_to_powers_of_visits(played):
    searches = started(SQUARE_ROOT, COUNT)
    for game in range(COUNT):
        for move in range(played):
            searches.play(game, move)
    searched(searches, {7: 100, 12: 4, 13: 0, PASS: 900})
    assert searches.finish_moves() == COUNT
    # sqrt(100) : sqrt(4) = 10 : 2, with four standard deviations.
    assert shares(searches)[[7, 12]] == pytest.approx([10 / 12, 2 / 12], abs=0.061)
    assert shares(searches)[[7, 12]].sum() == 1
    np.testing.assert_allclose(
        searches.pi[:, [7, 12, PASS]], np.tile(np.array([10, 2, 30]) / 42, (COUNT, 1)), rtol=1e-6
    )


def test_from_the_cut_off_the_most_visited_move_is_played_and_visits_are_the_distribution():
    searches = started(SQUARE_ROOT, 50)
    for game in range(50):
        searches.play(game, 0)
        searches.play(game, 1)
    searched(searches, {7: 100, 12: 4, PASS: 96})
    assert searches.finish_moves() == 50
    assert shares(searches)[7] == 1
    np.testing.assert_allclose(searches.pi[:, [7, 12, PASS]], np.tile([0.5, 0.02, 0.48], (50, 1)), rtol=1e-6)


def test_a_move_is_chosen_before_its_visits_are_pruned():
    searches = started(PRUNED, COUNT)
    searched(searches, {7: 10, 12: 9}, {7: 0.9, 12: -0.9})
    searches.finish_moves()
    # N = 20, c = 2.502, limit 0.9 + c sqrt(21) * 0.2 / 11 = 1.108. Move 12: c sqrt(20) * 0.2 / (1.108 + 0.9) = 1.1.
    np.testing.assert_allclose(searches.pi[0, [7, 12]], np.sqrt([10, 1]) / np.sqrt([10, 1]).sum(), rtol=1e-6)
    assert shares(searches)[12] == pytest.approx(3 / (3 + 10**0.5), abs=0.082)


def with_living_corner(to_play: int) -> Searches:
    """Return a game in which black's stones and eyes in the two upper rows are pass-alive.

    The position is ``..X.X XXXXX ..... OO... OOOOO``, with a black stone more in the third row if white is to move.
    """
    searches = started(PRUNED)
    for black, white in zip([2, 4, 5, 6, 7, 8, 9], [20, 21, 22, 23, 24, 15, 16], strict=True):
        searches.play(0, black)
        searches.play(0, white)
    if to_play < 0:
        searches.play(0, 10)
    return searches


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("passes", [3, 4])
@pytest.mark.parametrize("by_opponent", [True, False])
def test_pass_alive_points_are_left_out_only_after_four_passes_of_the_opponent(side, passes, by_opponent, early):
    searches = with_living_corner(side)
    opponent = 1 if side > 0 else 0
    searches.games.passes[0, opponent if by_opponent else 1 - opponent] = passes
    if early:
        searches.games.boards.state[0, MOVES] = 0
    # Both colours may play point 0 in the larger eye. No pruning: Q is 0, so nearly equal visits are justified.
    visits = {0: 64, 12: 36, PASS: 16}
    searched(searches, visits)
    assert searches.finish_moves() == 1
    restricted = by_opponent and passes == 4
    if restricted or not early:
        assert searches.moved[0] == (12 if restricted else 0)
    weights = np.array([0 if restricted else 64, 36, 16]) ** (0.5 if early else 1.0)
    np.testing.assert_allclose(searches.pi[0, [0, 12, PASS]], weights / weights.sum(), rtol=1e-6)


def test_a_position_keeps_its_symmetry_within_a_game():
    games = 64
    searches = started(SQUARE_ROOT, games)

    def symmetries_after(move: int | None) -> np.ndarray:
        for game in range(games if move is not None else 0):
            searches.play(game, move)
        count = len(searches.leaves())
        searches.answer(np.full((count, PASS + 1), 1 / (PASS + 1), np.float32), np.zeros(count, np.float32))
        return searches.games.symmetry[:, 0].copy()

    empty, after_pass, after_stone = symmetries_after(None), symmetries_after(PASS), symmetries_after(12)
    np.testing.assert_array_equal(after_pass, empty)  # the same stones
    assert set(empty) == set(range(8))  # games differ
    assert (after_stone != empty).sum() > games / 2  # and so do positions
