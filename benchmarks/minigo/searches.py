"""Concurrent searches of one thread: the arrays, and the compiled functions on them.

Shapes: G games, B leaves, K bytes of packed planes, A moves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.cache import Cache, make_cache
from benchmarks.minigo.engine import MOVES, make_rules
from benchmarks.minigo.features import feature_bytes, symmetry_tables
from benchmarks.minigo.moves import end_game, finish_moves, play_move, start_game
from benchmarks.minigo.positions import enlarged_positions
from benchmarks.minigo.search import SearchSettings, collect, constants, incorporate, make_games, make_scratch
from benchmarks.minigo.tree import enlarged, make_tree
from common.errors import ConfigError

_FIRST_NODES = 64
"""Nodes of the pool per game at the start. The pool grows when it is empty."""


class Searches:
    """The searches of games with one network.

    Attributes:
        games: the arrays of the games. Only games that are `active` are searched.
        moved: int64 (G,), the moves of the last :meth:`finish_moves`. NONE (`tree.py`) if a search goes on, and RESIGN
            (`moves.py`) if a colour has resigned.
        result: int8 (G,), 1 or -1 where the last :meth:`finish_moves` has ended a game.
        record: int64 (G,), the games of the last training records.
        record_bits: uint8 (G, K), their planes.
        pi: float32 (G, A), their distributions.
    """

    def __init__(self, settings: SearchSettings, games: int, seed: int, cache: Cache | None = None) -> None:
        if games < 1:
            raise ConfigError(f"a worker plays at least one game, not {games}")
        lines = settings.board
        self._settings, self._limits, self._seed = settings, constants(settings), np.uint64(seed)
        self._rules, self._tables = make_rules(lines), symmetry_tables(lines)
        self._cache = make_cache(lines, 0) if cache is None else cache
        capacity = lines * lines + 2 * settings.readouts
        self.games, self._scratch = make_games(settings, games, capacity), make_scratch(lines, capacity)
        self._tree = make_tree(lines, _FIRST_NODES * games)
        self._bits = np.zeros((games * settings.virtual_losses, feature_bytes(lines)), np.uint8)
        self.moved, self.result = np.zeros(games, np.int64), np.zeros(games, np.int8)
        self.record = np.zeros(games, np.int64)
        self.record_bits = np.zeros((games, self._bits.shape[1]), np.uint8)
        self.pi = np.zeros((games, lines * lines + 1), np.float32)

    def start(self, game: int, number: int) -> None:
        """Start a game; its random numbers depend on the seed and on ``number``."""
        settings = self._settings
        resign = float(settings.resign_low), float(settings.resign_high), float(settings.resign_disabled)
        self._reserve_node()
        start_game(self.games, self._tree, self._limits, game, self._seed, number, resign)

    def leaves(self) -> NDArray[np.uint8]:
        """Return the packed planes of the next leaves, (B, K), valid until the next call.

        There are none if no active game needs the network before its move.
        """
        self._reserve_positions()
        game, rows = 0, 0
        while True:
            game, rows = collect(
                self._rules,
                self.games,
                self._tree,
                self._scratch,
                self._tables,
                self._limits,
                self._cache,
                self._bits,
                game,
                rows,
            )
            if game == len(self.result):
                return self._bits[:rows]
            self._reserve_node()

    def answer(self, policy: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Give the network's answers for the last leaves, (B, A) and (B,), to the trees."""
        incorporate(self.games, self._tree, self._tables, self._limits, self._cache, policy, value)

    def finish_moves(self) -> int:
        """Play a move where the search is complete, and return the number of training records."""
        return finish_moves(
            self._rules,
            self.games,
            self._tree,
            self._limits,
            self._tables[0],
            self.moved,
            self.result,
            self.record,
            self.record_bits,
            self.pi,
        )

    def play(self, game: int, move: int) -> None:
        """Play a move that the search did not choose, and that does not end the game."""
        self._reserve_node()
        play_move(self._rules, self.games, self._tree, self._limits, game, move)

    def end(self, game: int) -> None:
        """Stop a game."""
        end_game(self.games, self._tree, game)

    def moves(self, game: int) -> int:
        """Return the number of moves and passes of a game."""
        return int(self.games.boards.state[game, MOVES])

    def _reserve_node(self) -> None:
        if self._tree.available[0] == 0:
            self._tree = enlarged(self._tree)

    def _reserve_positions(self) -> None:
        """Enlarge the sets of positions, unless they hold every game and its deepest possible descent."""
        games, capacity = self.games, len(self._scratch.slots)
        most = int(games.boards.state[:, MOVES].max() + games.target.max()) + 2
        if most > capacity:
            self.games = games._replace(past=enlarged_positions(games.past, 2 * most))
            self._scratch = make_scratch(self._settings.board, 2 * most)
