"""Games between two networks, for evaluation.

The players are numbers 0 and 1. Player 0 has black in games with an even number, and white in the others. Each player
has its own tree of every game. Only the player to move searches, and both trees follow every move.

Shapes: B leaves, K bytes of packed planes, A moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.moves import RESIGN
from benchmarks.minigo.search import SearchSettings
from benchmarks.minigo.searches import Searches
from benchmarks.minigo.tree import NONE
from common.errors import ConfigError


@dataclass(frozen=True)
class MatchGame:
    """A game that has ended.

    Attributes:
        number: number of the game in the evaluation.
        winner: the player that has won.
        moves: number of moves and passes.
        resigned: whether the other player has resigned.
    """

    number: int
    winner: int
    moves: int
    resigned: bool


class Match:
    """Plays games between two players, all of them at once::

    while not match.ended():
        for player in (0, 1):
            if len(bits := match.leaves(player)):
                match.answer(player, *networks[player](bits))
    """

    def __init__(self, settings: SearchSettings, numbers: Sequence[int], seed: int) -> None:
        """Start the games.

        Args:
            settings: fast moves are not allowed. Without noise and random choices, games differ by the symmetries of
                inference only.
            numbers: number of each game, of which another process may play others.
            seed: each game depends on the seed, its number and the networks only.
        """
        if settings.fast_probability:
            raise ConfigError("a match has no fast moves: fast_probability must be 0")
        self.finished: list[MatchGame] = []
        self._numbers = numbers
        self._searches = Searches(settings, len(numbers), seed), Searches(settings, len(numbers), seed)
        for game, number in enumerate(numbers):
            for player in (0, 1):
                self._searches[player].start(game, 2 * number + player)
            self._searches[1 - number % 2].games.active[game] = 0

    def ended(self) -> bool:
        """Return whether all games have ended."""
        return not any(searches.games.active.any() for searches in self._searches)

    def leaves(self, player: int) -> NDArray[np.uint8]:
        """Return the packed planes of the next leaves of a player, (B, K). B is 0 while it is to move in no game."""
        searches = self._searches[player]
        while searches.games.active.any():
            if len(bits := searches.leaves()):
                return bits
            self._finish_moves(player)
        return searches.record_bits[:0]

    def answer(self, player: int, policy: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Continue with the network's answers for the last leaves of a player, float32 (B, A) and (B,)."""
        self._searches[player].answer(policy, value)
        self._finish_moves(player)

    def _finish_moves(self, player: int) -> None:
        searches, other = self._searches[player], self._searches[1 - player]
        searches.finish_moves()
        for game in np.flatnonzero(searches.moved != NONE).tolist():
            if searches.result[game]:
                number = self._numbers[game]
                black = number % 2
                winner = black if searches.result[game] > 0 else 1 - black
                resigned = bool(searches.moved[game] == RESIGN)
                self.finished.append(MatchGame(number, winner, searches.moves(game), resigned))
                other.end(game)
            else:
                other.play(game, int(searches.moved[game]))
                searches.games.active[game], other.games.active[game] = 0, 1
