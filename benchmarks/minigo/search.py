"""Monte Carlo tree search of many games at once.

A worker repeats three steps for all its games: `collect` descends the trees until every game has leaves for the
network, the network evaluates the leaves of all games as one batch, and `incorporate` expands them. `moves.py` plays a
move in the games whose search is complete.

Shapes: G games, V leaves of a game in a batch, B leaves of a batch, K bytes of packed planes, A moves, P points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.benson import score
from benchmarks.minigo.cache import MISSING, Cache, CacheKey, find, key_of, store
from benchmarks.minigo.compiled import allocating, compiled
from benchmarks.minigo.engine import (
    MOVES,
    PASSES,
    Board,
    Rules,
    copy_board,
    legal_moves,
    make_board,
    play,
)
from benchmarks.minigo.features import SYMMETRIES
from benchmarks.minigo.planes import HISTORY, point_codes, write_planes
from benchmarks.minigo.positions import Positions, insert, make_positions, of_game, remove
from benchmarks.minigo.randomness import mixed, write_dirichlet
from benchmarks.minigo.tree import (
    Tree,
    add_virtual_loss,
    back_up,
    expand,
    mix_noise,
    select_child,
)
from common.config.ranges import AtLeast, Between, Finite, NotNegative, Positive, Share, ShareBelowOne
from common.errors import ConfigError


@dataclass(frozen=True)
class SearchSettings:
    """How games are searched and played.

    Attributes:
        board: number of lines.
        komi: points for white.
        readouts: new visits of the root on a full move, in addition to visits from earlier moves.
        fast_readouts: the same on a fast move.
        fast_probability: share of fast moves, whose distributions are no training data. The first move is never fast.
            If the share is not 0, the tree is cleared before full moves.
        virtual_losses: number V of leaves of a game in one batch.
        noise_alpha: parameter of the Dirichlet noise at the root of full moves.
        noise_mix: weight of the noise; 0 for no noise.
        value_init_penalty: how much lower than its parent's value a move's first Q is, for the colour to move.
        visit_exponent: exponent of visits in the random choice of early moves and in their distributions.
        soft_pick: whether the first P / 12 moves (the largest even number) are chosen at random.
        resign_low, resign_high: a game's threshold is uniform between them; -1 is a certain loss. A colour resigns if
            its value of the root is below the threshold.
        resign_disabled: share of games in which nobody resigns.
        holdout: share of the games that are set aside for validation; training does not use them.
        target_pruning: whether visits that the final values do not justify are removed from distributions.
        restrict_after: after this number of passes in a row by the opponent, a colour no longer plays in pass-alive
            points.
        allow_pass: whether a colour may pass though it has other legal moves.
    """

    board: Annotated[int, Between(2, 25)]
    komi: Annotated[float, Finite]
    readouts: Annotated[int, AtLeast(2, "at least 2, one for the root and one for a move")]
    fast_readouts: Annotated[int, AtLeast(2, "at least 2, one for the root and one for a move")]
    fast_probability: Annotated[float, Share]
    virtual_losses: Annotated[int, AtLeast(1)]
    noise_alpha: Annotated[float, Positive]
    noise_mix: Annotated[float, Share]
    value_init_penalty: Annotated[float, NotNegative]
    visit_exponent: Annotated[float, NotNegative]
    soft_pick: bool
    resign_low: Annotated[float, Finite]
    resign_high: Annotated[float, Finite]
    resign_disabled: Annotated[float, Share]
    holdout: Annotated[float, ShareBelowOne]
    target_pruning: bool
    restrict_after: Annotated[int, AtLeast(1)]
    allow_pass: bool

    def __post_init__(self) -> None:
        if self.resign_low > self.resign_high:
            raise ConfigError(f"resign_low={self.resign_low}: at most resign_high={self.resign_high}")


class Constants(NamedTuple):
    """:class:`SearchSettings` for compiled functions."""

    komi: float
    readouts: int
    fast_readouts: int
    fast_probability: float
    noise_alpha: float
    noise_mix: float
    penalty: float
    exponent: float
    soft_moves: int
    target_pruning: bool
    restrict_after: int
    allow_pass: bool
    alive_from: int
    """First number of moves after which a game ends if the whole board is pass-alive."""


def constants(settings: SearchSettings) -> Constants:
    """Return the constants of compiled functions."""
    lines = settings.board
    return Constants(
        float(settings.komi),
        int(settings.readouts),
        int(settings.fast_readouts),
        float(settings.fast_probability),
        float(settings.noise_alpha),
        float(settings.noise_mix),
        float(settings.value_init_penalty),
        float(settings.visit_exponent),
        lines * lines // 12 // 2 * 2 if settings.soft_pick else 0,
        bool(settings.target_pruning),
        int(settings.restrict_after),
        bool(settings.allow_pass),
        lines * ((lines + 2) // 3),
    )


class Games(NamedTuple):
    """The games of a worker; every array has one row per game.

    Attributes:
        boards: the arrays of :class:`~benchmarks.minigo.engine.Board`, with one row per game.
        recent: int8 (G, HISTORY, A), the stones of the newest positions. The position after n moves is in row
            n % HISTORY.
        past: all positions of each game, and during a descent those of its path.
        passes: int64 (G, 2), passes in a row of black and white. A number that has reached `restrict_after` stays.
        root: int64 (G,), the node of the position.
        target: int64 (G,), visits of the root at which the search is complete.
        full: int8 (G,), whether the move is a full one.
        noisy: int8 (G,), whether the root still needs noise.
        active: int8 (G,), whether the game is searched and played.
        threshold: float64 (G,), value below which a colour resigns.
        stream: uint64 (G, 1), random stream.
        salt: uint64 (G,), the game's part of the hash that chooses symmetries.
        leaves: int64 (G,), number of leaves that the network has evaluated.
        queued: int64 (G,), number of leaves in the current batch.
        leaf: int64 (G, V), their nodes.
        row: int64 (G, V), their rows in the batch, or -1 for a leaf that is there already.
        symmetry: int64 (G, V), the symmetries of their planes.
        key, canonical: uint64 and int64 (G, V), their keys in the cache: hash and canonical view.
        legal: int8 (G, V, A), their legal moves.
    """

    boards: Board
    recent: NDArray[np.int8]
    past: Positions
    passes: NDArray[np.int64]
    root: NDArray[np.int64]
    target: NDArray[np.int64]
    full: NDArray[np.int8]
    noisy: NDArray[np.int8]
    active: NDArray[np.int8]
    threshold: NDArray[np.float64]
    stream: NDArray[np.uint64]
    salt: NDArray[np.uint64]
    leaves: NDArray[np.int64]
    queued: NDArray[np.int64]
    leaf: NDArray[np.int64]
    row: NDArray[np.int64]
    symmetry: NDArray[np.int64]
    key: NDArray[np.uint64]
    canonical: NDArray[np.int64]
    legal: NDArray[np.int8]


def make_games(settings: SearchSettings, games: int, capacity: int) -> Games:
    """Return the arrays of ``games`` games, none of which has started, with sets of ``capacity`` positions."""
    moves, leaves = settings.board**2 + 1, settings.virtual_losses
    return Games(
        Board._make(np.repeat(array[None], games, axis=0) for array in make_board(settings.board)),
        recent=np.zeros((games, HISTORY, moves), np.int8),
        past=make_positions(capacity, games),
        passes=np.zeros((games, 2), np.int64),
        root=np.zeros(games, np.int64),
        target=np.zeros(games, np.int64),
        full=np.zeros(games, np.int8),
        noisy=np.zeros(games, np.int8),
        active=np.zeros(games, np.int8),
        threshold=np.zeros(games, np.float64),
        stream=np.zeros((games, 1), np.uint64),
        salt=np.zeros(games, np.uint64),
        leaves=np.zeros(games, np.int64),
        queued=np.zeros(games, np.int64),
        leaf=np.zeros((games, leaves), np.int64),
        row=np.zeros((games, leaves), np.int64),
        symmetry=np.zeros((games, leaves), np.int64),
        key=np.zeros((games, leaves), np.uint64),
        canonical=np.zeros((games, leaves), np.int64),
        legal=np.zeros((games, leaves, moves), np.int8),
    )


class Scratch(NamedTuple):
    """Memory for one descent: the position, the newest positions, and the slots of the path's positions.

    Attributes:
        board: the position that the descent has reached.
        recent: int8 (HISTORY, A).
        slots: int64, one for each position of the path.
        noise: float64 (A,).
    """

    board: Board
    recent: NDArray[np.int8]
    slots: NDArray[np.int64]
    noise: NDArray[np.float64]


def make_scratch(size: int, capacity: int) -> Scratch:
    """Return memory for descents of at most ``capacity`` moves."""
    moves = size * size + 1
    return Scratch(
        make_board(size), np.zeros((HISTORY, moves), np.int8), np.zeros(capacity, np.int64), np.zeros(moves, np.float64)
    )


@allocating
def board_of(games: Games, game: int) -> Board:
    """Return the position of a game; the arrays are views."""
    boards = games.boards
    return Board(
        boards.stones[game],
        boards.chain[game],
        boards.following[game],
        boards.liberties[game],
        boards.state[game],
        boards.key[game],
    )


@compiled
def remember(board: Board, recent: NDArray[np.int8], past: Positions) -> int | np.int64:
    """Add a new position to the newest positions and to those of the game. Return its slot, or -1 after a pass."""
    newest = recent[board.state[MOVES] % HISTORY]
    for point in range(board.stones.size):
        newest[point] = board.stones[point]
    return insert(past, board.key[0]) if board.state[PASSES] == 0 else -1


@allocating
def collect(
    rules: Rules,
    games: Games,
    tree: Tree,
    scratch: Scratch,
    tables: NDArray[np.int64],
    limits: Constants,
    cache: Cache,
    bits: NDArray[np.uint8],
    first: int,
    rows: int,
) -> tuple[int, int]:
    """Descend the trees of all active games, and write the planes of leaves into ``bits`` (G * V, K).

    Leaves whose evaluation is in the cache are expanded at once.

    Args:
        tables: (8, P), the symmetries.
        first: the game to begin with.
        rows: number of rows of ``bits`` that are filled already.

    Returns:
        The game at which the pool had no free node, or G if all leaves are there, and the number of filled rows. In the
        first case the caller enlarges the pool and calls again.
    """
    capacity = games.leaf.shape[1]
    for game in range(first, games.root.size):
        root = games.root[game]
        while (
            games.active[game]
            and games.queued[game] < capacity
            and tree.visits[root] + games.queued[game] < games.target[game]
        ):
            if tree.available[0] == 0:
                return game, rows
            if games.noisy[game] and tree.expanded[root]:
                games.noisy[game] = 0
                write_dirichlet(games.stream[game], limits.noise_alpha, scratch.noise)
                mix_noise(tree, root, scratch.noise, limits.noise_mix)
            node, filled = _descend(rules, games, game, tree, scratch)
            if scratch.board.state[PASSES] >= 2:
                if tree.result[node] == 0:
                    tree.result[node] = 1 if score(rules, scratch.board, limits.komi) > 0 else -1
                back_up(tree, node, np.float64(tree.result[node]))
            else:
                rows = _queue(rules, games, game, tree, scratch, tables, limits, cache, bits, node, rows)
            for i in range(filled - 1, -1, -1):
                remove(of_game(games.past, game), scratch.slots[i])
            if node == root and not tree.expanded[root]:
                break
    return games.root.size, rows


@allocating
def _descend(rules: Rules, games: Games, game: int, tree: Tree, scratch: Scratch) -> tuple[int, int]:
    """Select a leaf and play the moves to it. Return its node, and the number of new positions in the game's set."""
    board, recent, past = scratch.board, scratch.recent, of_game(games.past, game)
    copy_board(board, board_of(games, game))
    for age in range(HISTORY):
        for point in range(recent.shape[1]):
            recent[age, point] = games.recent[game, age, point]
    node, filled = games.root[game], 0
    while tree.expanded[node]:
        node = select_child(tree, node)
        play(rules, board, tree.move[node])
        slot = remember(board, recent, past)
        if slot >= 0:
            scratch.slots[filled] = slot
            filled += 1
    return node, filled


@allocating
def _queue(
    rules: Rules,
    games: Games,
    game: int,
    tree: Tree,
    scratch: Scratch,
    tables: NDArray[np.int64],
    limits: Constants,
    cache: Cache,
    bits: NDArray[np.uint8],
    node: int,
    rows: int,
) -> int:
    """Queue a leaf with a virtual loss, unless the cache has it, and return the number of filled rows."""
    index = games.queued[game]
    games.leaf[game, index] = node
    games.row[game, index] = -1
    for i in range(index):
        if games.leaf[game, i] == node:
            _await(games, game, tree, node)
            return rows
    symmetry = np.int64(mixed(scratch.board.key[0] ^ games.salt[game]) & np.uint64(SYMMETRIES - 1))
    legal = games.legal[game, index]
    legal_moves(rules, scratch.board, of_game(games.past, game), legal)
    codes = point_codes(scratch.board, scratch.recent, legal)
    if cache.keys.size:
        key = key_of(cache, codes)
        slot = find(cache, key, symmetry)
        if slot != MISSING:
            policy, value = cache.policy[slot], np.float64(cache.value[slot])
            expand(tree, node, policy, value, tables[key.canonical], legal, limits.penalty, limits.allow_pass)
            back_up(tree, node, value)
            return rows
        games.key[game, index], games.canonical[game, index] = key.hash, key.canonical
    write_planes(codes, tables[symmetry], bits[rows])
    games.row[game, index] = rows
    games.symmetry[game, index] = symmetry
    _await(games, game, tree, node)
    return rows + 1


@allocating
def _await(games: Games, game: int, tree: Tree, node: int) -> None:
    """Count a leaf of which the answer is awaited, and add its virtual loss."""
    games.queued[game] += 1
    add_virtual_loss(tree, node, np.int64(1))


@allocating
def incorporate(
    games: Games,
    tree: Tree,
    tables: NDArray[np.int64],
    limits: Constants,
    cache: Cache,
    policy: NDArray[np.float32],
    value: NDArray[np.float32],
) -> None:
    """Expand the queued leaves with the network's answers, or the means in the cache, and empty the queues.

    Args:
        policy: (B, A), probabilities of moves.
        value: (B,), black's.
    """
    for game in range(games.root.size):
        for i in range(games.queued[game]):
            node, row = games.leaf[game, i], games.row[game, i]
            add_virtual_loss(tree, node, np.int64(-1))
            if row < 0:
                continue
            symmetry, legal = games.symmetry[game, i], games.legal[game, i]
            answer, estimate = policy[row], np.float64(value[row])
            if cache.keys.size:
                key = CacheKey(games.key[game, i], games.canonical[game, i])
                slot = store(cache, key, symmetry, tables, answer, estimate)
                answer, estimate, symmetry = cache.policy[slot], np.float64(cache.value[slot]), key.canonical
            expand(tree, node, answer, estimate, tables[symmetry], legal, limits.penalty, limits.allow_pass)
            back_up(tree, node, estimate)
            games.leaves[game] += 1
        games.queued[game] = 0
