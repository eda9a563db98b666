"""Self-play of many concurrent games in one thread.

The caller moves batches between the games and the network::

    while len(bits := play.leaves()):
        play.answer(*network(bits))
        store(play.take_finished())
    store(play.take_finished())

Two objects in one process have two batches in flight: one searches while the network evaluates the leaves of the other.

Shapes: G games, B leaves, K bytes of packed planes, A moves, M records of a game.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.cache import Cache
from benchmarks.minigo.moves import RESIGN
from benchmarks.minigo.search import SearchSettings
from benchmarks.minigo.searches import Searches


@dataclass(frozen=True)
class FinishedGame:
    """A game that has ended, with one record for each full move.

    Attributes:
        number: number of the game.
        bits: uint8 (M, K), packed planes.
        pi: float32 (M, A), distributions of the searches over moves.
        outcome: 1 if black has won, -1 if white has won.
        moves: number of moves and passes.
        resigned: whether a colour has resigned.
        leaves: number of positions that the network has evaluated.
    """

    number: int
    bits: NDArray[np.uint8]
    pi: NDArray[np.float32]
    outcome: float
    moves: int
    resigned: bool
    leaves: int


class SelfPlay:
    """Plays games of a network with itself."""

    def __init__(
        self,
        settings: SearchSettings,
        games: int,
        seed: int,
        *,
        first: int = 0,
        stride: int = 1,
        total: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        """Start the first games.

        Args:
            games: number G of concurrent games.
            seed: a game depends on the seed, its number and the network only.
            first: number of the first game.
            stride: difference of the numbers of successive games.
            total: number of games to play; None for any number.
            cache: stored answers of the network, which other objects can share; None: none are stored. With a cache, a
                game also depends on other games.
        """
        self._searches = Searches(settings, games, seed, cache)
        self._next, self._stride, self._left = first, stride, total
        self._numbers = [0] * games
        self._records: list[list[tuple[NDArray[np.uint8], NDArray[np.float32]]]] = [[] for _ in range(games)]
        self._finished: list[FinishedGame] = []
        for game in range(games):
            self._start(game)

    def leaves(self) -> NDArray[np.uint8]:
        """Return the packed planes of the next leaves, (B, K). They are valid until the next call.

        B is at most G times the number of virtual losses, and 0 only after the last game.
        """
        while self._searches.games.active.any():
            if len(bits := self._searches.leaves()):
                return bits
            self._finish_moves()  # the last visits of all searches were to positions after the end of the game
        return self._searches.record_bits[:0]

    def answer(self, policy: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Continue with the network's answers for the last leaves.

        Args:
            policy: float32 (B, A), probabilities of moves.
            value: float32 (B,), black's, between -1 and 1.
        """
        self._searches.answer(policy, value)
        self._finish_moves()

    def take_finished(self) -> list[FinishedGame]:
        """Return the games that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _start(self, game: int) -> None:
        if self._left is not None:
            if self._left == 0:
                return
            self._left -= 1
        self._numbers[game], self._next = self._next, self._next + self._stride
        self._searches.start(game, self._numbers[game])

    def _finish_moves(self) -> None:
        searches = self._searches
        for record in range(searches.finish_moves()):
            pair = searches.record_bits[record].copy(), searches.pi[record].copy()
            self._records[searches.record[record]].append(pair)
        for game in np.flatnonzero(searches.result):
            self._end(int(game))

    def _end(self, game: int) -> None:
        searches, records = self._searches, self._records[game]
        bits = np.array([bits for bits, _ in records], np.uint8).reshape(len(records), searches.record_bits.shape[1])
        pi = np.array([pi for _, pi in records], np.float32).reshape(len(records), searches.pi.shape[1])
        self._finished.append(
            FinishedGame(
                self._numbers[game],
                bits,
                pi,
                float(searches.result[game]),
                searches.moves(game),
                bool(searches.moved[game] == RESIGN),
                int(searches.games.leaves[game]),
            )
        )
        self._records[game] = []
        self._start(game)
