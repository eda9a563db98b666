"""Games and positions for tests, from drawings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.engine import MOVES, TO_PLAY, legal_moves, make_board, make_rules, play
from benchmarks.minigo.planes import HISTORY
from benchmarks.minigo.positions import insert, make_positions, of_game

RULES = {size: make_rules(size) for size in (2, 3, 5, 7, 9, 19)}


class Game:
    """One game of the compiled engine."""

    def __init__(self, size: int) -> None:
        self.size, self.rules, self.board = size, RULES[size], make_board(size)
        self.past = of_game(make_positions(4 * size * size, 1), 0)
        insert(self.past, self.board.key[0])
        self.recent = np.zeros((HISTORY, size * size + 1), np.int8)
        self.recent[0] = self.board.stones

    def legal(self) -> NDArray[np.int8]:
        """Return 0, 1 or CAPTURES for every move."""
        legal = np.empty(self.size**2 + 1, np.int8)
        legal_moves(self.rules, self.board, self.past, legal)
        return legal

    def play(self, *moves: int | str) -> Game:
        """Play legal moves: numbers, or letter of the column and number of the row from the top, such as ``b3``."""
        for name in moves:
            move = self.point(name) if isinstance(name, str) else int(name)
            assert self.legal()[move], f"{name} is illegal"
            play(self.rules, self.board, move)
            self.recent[self.board.state[MOVES] % HISTORY] = self.board.stones
            if move < self.size**2:
                insert(self.past, self.board.key[0])
        return self

    def point(self, name: str) -> int:
        """Return the number of a point; of the pass move for ``pass``."""
        return self.size**2 if name == "pass" else (int(name[1:]) - 1) * self.size + ord(name[0]) - ord("a")

    def stones(self) -> str:
        """Return the drawing of the board."""
        text = "".join(".XO"[stone] for stone in self.board.stones[:-1])
        return "\n".join(text[row : row + self.size] for row in range(0, len(text), self.size))


def drawn(text: str, to_play: int = 1) -> Game:
    """Return a game whose position is a drawing: X is black, O white.

    The stones are played one by one. If all chains of the drawing have a liberty, then the chains of every part of its
    stones have one, so no move captures.
    """
    rows = text.split()
    game = Game(len(rows))
    for point, stone in enumerate("".join(rows)):
        if stone != ".":
            game.board.state[TO_PLAY] = 1 if stone == "X" else -1
            play(game.rules, game.board, point)
            game.recent[game.board.state[MOVES] % HISTORY] = game.board.stones
            insert(game.past, game.board.key[0])
    game.board.state[TO_PLAY] = to_play
    assert game.stones() == "\n".join(rows)
    return game
