"""Matches of two networks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.minigo.match import Match
from common.errors import ConfigError
from tests.benchmarks.minigo.test_minigo_games import SMALL, hashed

EVALUATION = dataclasses.replace(SMALL, readouts=24, fast_probability=0.0, noise_mix=0.0, soft_pick=False)


def never_passes(bits: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    policy, value = hashed(bits, 26)
    policy[:, 25] = 0
    return policy, np.zeros_like(value)


def always_passes(bits: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    policy = np.zeros((len(bits), 26), np.float32)
    policy[:, 25] = 1
    return policy, np.zeros(len(bits), np.float32)


def matched(first, second, numbers: range) -> Match:
    match = Match(EVALUATION, numbers, seed=1)
    while not match.ended():
        for player, network in enumerate((first, second)):
            if len(bits := match.leaves(player)):
                match.answer(player, *network(bits))
    match.finished.sort(key=lambda game: game.number)
    return match


def test_a_player_that_owns_the_board_wins_with_both_colours():
    for networks, winner in (((never_passes, always_passes), 0), ((always_passes, never_passes), 1)):
        match = matched(*networks, range(6))
        assert [game.number for game in match.finished] == list(range(6))
        assert [game.winner for game in match.finished] == [winner] * 6


def test_a_match_is_reproducible_and_its_games_differ():
    def network(bits):
        return hashed(bits, 26)

    first, second = matched(network, network, range(6)), matched(network, network, range(6))
    assert first.finished == second.finished
    assert len({(game.winner, game.moves) for game in first.finished}) > 1


def test_games_depend_on_their_numbers_and_not_on_the_other_games():
    def network(bits):
        return hashed(bits, 26)

    together = matched(network, network, range(6)).finished
    assert matched(network, network, range(1, 6, 2)).finished == together[1::2]


def test_fast_moves_are_refused():
    with pytest.raises(ConfigError, match="fast_probability"):
        Match(SMALL, range(2), seed=1)
