"""Moves of games whose search is complete: resignation, choice, distribution, and the end of a game.

Shapes: G games, K bytes of packed planes, A moves, P points.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.benson import pass_alive, score
from benchmarks.minigo.compiled import allocating
from benchmarks.minigo.engine import (
    BLACK,
    EMPTY,
    MOVES,
    PASSES,
    TO_PLAY,
    Board,
    Rules,
    clear_board,
    legal_moves,
    play,
)
from benchmarks.minigo.planes import point_codes, write_planes
from benchmarks.minigo.positions import clear, of_game
from benchmarks.minigo.randomness import mixed, uniform
from benchmarks.minigo.search import Constants, Games, board_of, remember
from benchmarks.minigo.tree import (
    NONE,
    Tree,
    advance_root,
    clear_root,
    free_tree,
    most_visited,
    new_node,
    prune_visits,
    quality,
    write_pi,
)

RESIGN = -2
"""Entry of the moves that :func:`finish_moves` reports, for a colour that resigns."""


@allocating
def start_game(
    games: Games,
    tree: Tree,
    limits: Constants,
    game: int,
    seed: np.uint64,
    number: int,
    resign: tuple[float, float, float],
) -> None:
    """Start a game from the empty board.

    Args:
        seed, number: seed and number of the game, which determine its random numbers.
        resign: lowest and highest threshold, and the share of games in which nobody resigns.
    """
    board = board_of(games, game)
    clear_board(board)
    games.recent[game] = 0
    clear(of_game(games.past, game))
    remember(board, games.recent[game], of_game(games.past, game))
    games.passes[game] = 0
    games.leaves[game], games.queued[game] = 0, 0
    games.stream[game, 0] = mixed(mixed(seed) ^ np.uint64(number))
    games.salt[game] = mixed(~games.stream[game, 0])
    games.active[game] = 1
    low, high, disabled = resign
    threshold = low + (high - low) * uniform(games.stream[game])
    games.threshold[game] = -np.inf if uniform(games.stream[game]) < disabled else threshold
    games.root[game] = new_node(tree, NONE, NONE, BLACK, 0.0, 0.0)
    begin_move(games, tree, limits, game)


@allocating
def begin_move(games: Games, tree: Tree, limits: Constants, game: int) -> None:
    """Choose between a full and a fast move, and set the number of visits at which the search is complete."""
    root, mixture = games.root[game], limits.fast_probability > 0
    fast = mixture and games.boards.state[game, MOVES] > 0 and uniform(games.stream[game]) < limits.fast_probability
    # The target is computed before the tree is cleared, so a full move repeats the visits that it inherits.
    games.target[game] = tree.visits[root] + (limits.fast_readouts if fast else limits.readouts)
    games.full[game] = not fast
    games.noisy[game] = not fast and limits.noise_mix > 0
    if mixture and not fast:
        clear_root(tree, root)


@allocating
def play_move(rules: Rules, games: Games, tree: Tree, limits: Constants, game: int, move: int) -> int:
    """Play a move in a game, and begin the next one. Return 1 or -1 if black or white has won by score, 0 otherwise."""
    board = board_of(games, game)
    points = rules.neighbours.shape[0]
    counter = 0 if board.state[TO_PLAY] == BLACK else 1
    if move == points:
        games.passes[game, counter] += 1
    elif games.passes[game, counter] < limits.restrict_after:
        games.passes[game, counter] = 0
    play(rules, board, move)
    remember(board, games.recent[game], of_game(games.past, game))
    games.root[game] = advance_root(tree, games.root[game], move)
    if board.state[MOVES] >= limits.alive_from and _whole_board_alive(rules, board):
        while board.state[PASSES] < 2:
            play(rules, board, points)
    if board.state[PASSES] >= 2:
        return 1 if score(rules, board, limits.komi) > 0 else -1
    begin_move(games, tree, limits, game)
    return 0


@allocating
def _whole_board_alive(rules: Rules, board: Board) -> bool:
    owner = np.empty(rules.neighbours.shape[0], np.int8)
    pass_alive(rules, board, owner)
    return bool(np.all(owner != EMPTY))


@allocating
def end_game(games: Games, tree: Tree, game: int) -> None:
    """Stop a game and return its nodes to the pool."""
    games.active[game] = 0
    free_tree(tree, games.root[game])


@allocating
def finish_moves(
    rules: Rules,
    games: Games,
    tree: Tree,
    limits: Constants,
    table: NDArray[np.int64],
    moved: NDArray[np.int64],
    result: NDArray[np.int8],
    record: NDArray[np.int64],
    bits: NDArray[np.uint8],
    pi: NDArray[np.float32],
) -> int:
    """Play a move in every active game whose search is complete, and return the number of training records.

    Args:
        table: (P,), the identity.
        moved: (G,), gets the moves that were played; NONE where the search goes on, RESIGN where a colour resigned.
        result: (G,), gets 1 or -1 where black or white has won, and 0 elsewhere. Games with a result become inactive.
        record: (G,), gets the game of each record.
        bits: (G, K), get the planes of the records.
        pi: (G, A), gets their distributions.
    """
    records, points = 0, rules.neighbours.shape[0]
    owner = np.zeros(points + 1, np.int8)
    for game in range(games.root.size):
        moved[game], result[game] = NONE, 0
        root, stream = games.root[game], games.stream[game]
        if not games.active[game] or tree.visits[root] < games.target[game]:
            continue
        board = board_of(games, game)
        side = board.state[TO_PLAY]
        if side * quality(tree, root) < games.threshold[game]:
            moved[game], result[game] = RESIGN, -side
            end_game(games, tree, game)
            continue
        owner[:] = EMPTY
        if games.passes[game, 1 if side == BLACK else 0] >= limits.restrict_after:
            pass_alive(rules, board, owner[:points])
        early = board.state[MOVES] < limits.soft_moves
        move = _choose(tree, root, owner, early, limits.exponent, stream)
        if games.full[game]:
            legal = games.legal[game, 0]  # free between batches
            legal_moves(rules, board, of_game(games.past, game), legal)
            write_planes(point_codes(board, games.recent[game], legal), table, bits[records])
            if limits.target_pruning:
                prune_visits(tree, root, owner)
            write_pi(tree, root, limits.exponent if early else 1.0, pi[records])
            record[records] = game
            records += 1
        moved[game] = move
        result[game] = play_move(rules, games, tree, limits, game, move)
        if result[game] != 0:
            end_game(games, tree, game)
    return records


@allocating
def _choose(
    tree: Tree, root: int, owner: NDArray[np.int8], early: bool, exponent: float, stream: NDArray[np.uint64]
) -> int:
    """Return the move to play: early in a game a random point in proportion to visits**exponent, else the most visited.

    Args:
        owner: (A,), moves whose entry is not EMPTY are not played. If no move is left, the colour passes.
    """
    points = owner.size - 1
    if early:
        weights, total = np.zeros(points), 0.0
        child = tree.child[root]
        while child != NONE:
            move = tree.move[child]
            if move < points and owner[move] == EMPTY and tree.visits[child] > 0:
                weights[move] = float(tree.visits[child]) ** exponent
                total += weights[move]
            child = tree.sibling[child]
        if total > 0.0:
            left, chosen = total * uniform(stream), NONE
            for move in range(points):
                if weights[move] > 0.0 and left >= 0.0:
                    chosen = move
                    left -= weights[move]
            return chosen
    child = most_visited(tree, root, owner)
    return points if child == NONE else tree.move[child]
