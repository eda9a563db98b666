"""A slow engine in plain Python: flood fill for chains, and a set of board tuples for superko."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


class SlowGo:
    """One game. Boards are tuples of 1 (black), -1 (white) and 0, row by row."""

    def __init__(self, size: int) -> None:
        self.size, self.points = size, size * size
        self.board = (0,) * self.points
        self.colour = 1
        self.passes = 0
        self.seen = {self.board}
        self.near = [[*self._beside(point)] for point in range(self.points)]

    @classmethod
    def of(cls, size: int, stones: Iterable[int]) -> SlowGo:
        """Return a game with one position."""
        game = cls(size)
        game.board = tuple(map(int, stones))
        return game

    def _beside(self, point: int) -> Iterator[int]:
        row, column = divmod(point, self.size)
        for r, c in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if 0 <= r < self.size and 0 <= c < self.size:
                yield r * self.size + c

    def connected(self, start: int, belongs: Callable[[int], bool]) -> set[int]:
        """Return the points that are connected to ``start`` through points that belong."""
        found, waiting = {start}, [start]
        while waiting:
            for other in self.near[waiting.pop()]:
                if other not in found and belongs(other):
                    found.add(other)
                    waiting.append(other)
        return found

    def chains(self, board: tuple[int, ...]) -> list[tuple[int, set[int], set[int]]]:
        """Return colour, stones and liberties of every chain."""
        found, seen = [], set()
        for point in range(self.points):
            if board[point] and point not in seen:
                colour = board[point]
                stones = self.connected(point, lambda other, colour=colour: board[other] == colour)
                seen |= stones
                liberties = {other for stone in stones for other in self.near[stone] if board[other] == 0}
                found.append((colour, stones, liberties))
        return found

    def after(self, point: int, chains: list[tuple[int, set[int], set[int]]]) -> tuple[int, ...] | None:
        """Return the board after a stone, or None for an occupied point, a suicide or an earlier position."""
        if self.board[point]:
            return None
        board = list(self.board)
        board[point] = self.colour
        captured = [stones for colour, stones, free in chains if colour != self.colour and free == {point}]
        for stone in set().union(*captured):
            board[stone] = 0
        joined = [free for colour, stones, free in chains if colour == self.colour and point in free]
        breathes = captured or any(self.board[other] == 0 for other in self.near[point])
        if not breathes and not any(len(free) > 1 for free in joined):
            return None
        result = tuple(board)
        return None if result in self.seen else result

    def legal(self) -> dict[int, tuple[int, ...]]:
        """Return the board after every legal move; pass leaves it unchanged."""
        chains = self.chains(self.board)
        found = {point: self.after(point, chains) for point in range(self.points)}
        return {point: board for point, board in found.items() if board is not None} | {self.points: self.board}

    def play(self, move: int) -> None:
        """Play a legal move."""
        self.passes = self.passes + 1 if move == self.points else 0
        self.board = self.legal()[move]
        self.seen.add(self.board)
        self.colour = -self.colour

    def alive(self, colour: int) -> set[int]:
        """Return the pass-alive points of a colour: Benson's algorithm on sets."""
        board = self.board
        chains = [(frozenset(stones), free) for owner, stones, free in self.chains(board) if owner == colour]
        regions = set()
        for point in range(self.points):
            if board[point] != colour:
                regions.add(frozenset(self.connected(point, lambda other: board[other] != colour)))
        while True:
            vital = [
                [region for region in regions if {p for p in region if board[p] == 0} <= free] for _, free in chains
            ]
            kept = [chain for chain, own in zip(chains, vital, strict=True) if len(own) >= 2]
            stones = set().union(*(stones for stones, _ in kept))
            border = {r: {q for p in r for q in self.near[p] if board[q] == colour} for r in regions}
            left = {region for region in regions if border[region] <= stones}
            if len(kept) == len(chains) and left == regions:
                return stones.union(*(region for own in vital for region in own))
            chains, regions = kept, left

    def score(self, komi: float) -> float:
        """Return black's area minus white's area and komi."""
        owner = dict.fromkeys(range(self.points), 0)
        for point in range(self.points):
            if self.board[point]:
                owner[point] = self.board[point]
            else:
                region = self.connected(point, lambda other: self.board[other] == 0)
                beside = {self.board[q] for p in region for q in self.near[p]} - {0}
                owner[point] = beside.pop() if len(beside) == 1 else 0
        for colour in (1, -1):
            owner |= dict.fromkeys(self.alive(colour), colour)
        return sum(owner.values()) - komi
