"""Search trees as arrays, and PUCT.

All games of a thread share one pool of nodes. A node has the statistics of the move that leads to it, as in AlphaGo
Zero. Only moves that a search has selected have nodes; the others are entries of the row of priors of their parent. All
moves without a node have the same Q, so the one with the largest prior represents them, and a selection looks only at
the nodes and at this move. The result is that of a comparison of all moves.

Values are black's: 1 if black wins, -1 if white wins. A node's Q is W / (1 + N), where W begins with the parent's value
minus a penalty, as if the move had been visited once already.

Shapes: C nodes of the pool, A moves, P points.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.minigo.compiled import allocating, compiled
from benchmarks.minigo.engine import EMPTY

C_BASE, C_INIT = 19652.0, 1.25
"""Constants of the exploration rate 2 (ln((1 + N + C_BASE) / C_BASE) + C_INIT)."""

NONE = -1
"""No node, no move; also the prior of a move that is illegal or has a node."""


class Tree(NamedTuple):
    """The pool of nodes.

    Attributes:
        parent, child, sibling: int64 (C,), the parent, the first child, and the next child of the parent; NONE if there
            is none.
        move: int64 (C,), the move that leads to the node.
        colour: int8 (C,), the colour to move.
        visits: int32 (C,), N.
        total: float32 (C,), W, without virtual losses.
        virtual: int32 (C,), the number of virtual losses. Each counts in W as a win of the colour to move.
        prior: float32 (C,), P of the move that leads to the node.
        expanded: int8 (C,), whether the network has evaluated the node.
        result: int8 (C,), 1 or -1 if the game has ended here, 0 otherwise.
        start: float32 (C,), the first W of children.
        priors: float32 (C, A), P of moves without a node, NONE for all others.
        best: int64 (C,), the move with the largest of these priors, or NONE.
        free: int64 (C,), the numbers of free nodes.
        available: int64 (1,), how many nodes are free.
    """

    parent: NDArray[np.int64]
    child: NDArray[np.int64]
    sibling: NDArray[np.int64]
    move: NDArray[np.int64]
    colour: NDArray[np.int8]
    visits: NDArray[np.int32]
    total: NDArray[np.float32]
    virtual: NDArray[np.int32]
    prior: NDArray[np.float32]
    expanded: NDArray[np.int8]
    result: NDArray[np.int8]
    start: NDArray[np.float32]
    priors: NDArray[np.float32]
    best: NDArray[np.int64]
    free: NDArray[np.int64]
    available: NDArray[np.int64]


_NODE = np.dtype(
    {
        "names": [
            *("sibling", "visits", "total", "virtual", "prior", "move", "colour"),
            *("expanded", "result", "best", "parent", "child", "start"),
        ],
        "formats": ["i8", "i4", "f4", "i4", "f4", "i8", "i1", "i1", "i1", "i8", "i8", "i8", "f4"],
        "offsets": [0, 8, 12, 16, 20, 24, 32, 33, 34, 40, 48, 56, 36],
        "itemsize": 64,
    }
)
"""A node's fields are together in memory, so that a selection loads one cache line per child."""


def make_tree(size: int, nodes: int) -> Tree:
    """Return a pool of free nodes for a board with ``size`` lines."""
    fields = np.zeros(nodes, _NODE)
    return Tree(
        **{name: fields[name] for name in _NODE.names or ()},
        priors=np.zeros((nodes, size * size + 1), np.float32),
        free=np.arange(nodes, dtype=np.int64)[::-1].copy(),
        available=np.array([nodes], np.int64),
    )


def enlarged(tree: Tree) -> Tree:
    """Return a pool with the same nodes and twice the capacity. No node of ``tree`` may be free."""
    nodes, moves = tree.priors.shape
    larger = make_tree(math.isqrt(moves), 2 * nodes)
    for name in (*(_NODE.names or ()), "priors"):
        getattr(larger, name)[:nodes] = getattr(tree, name)
    larger.available[0] = nodes  # the first free nodes are the new ones: `free` begins with the highest numbers
    return larger


@compiled
def new_node(tree: Tree, parent: int, move: int, colour: int | np.integer[Any], prior: float, start: float) -> int:
    """Take a node from the pool and return its number. The pool must have a free node."""
    tree.available[0] -= 1
    node = tree.free[tree.available[0]]
    tree.parent[node], tree.child[node], tree.sibling[node] = parent, NONE, NONE
    tree.move[node], tree.colour[node], tree.prior[node] = move, colour, prior
    tree.visits[node], tree.total[node], tree.virtual[node] = 0, start, 0
    tree.expanded[node], tree.result[node] = 0, 0
    if parent != NONE:
        tree.sibling[node] = tree.child[parent]
        tree.child[parent] = node
    return node


@compiled
def free_below(tree: Tree, top: int) -> None:
    """Return all descendants of ``top`` to the pool."""
    node = tree.child[top]
    tree.child[top] = NONE
    if node == NONE:
        return
    while True:  # depth first; children's nodes are freed before their parent's
        while tree.child[node] != NONE:
            node = tree.child[node]
        _free(tree, node)
        if tree.sibling[node] != NONE:
            node = tree.sibling[node]
        else:
            node = tree.parent[node]
            if node == top:
                return
            tree.child[node] = NONE


@compiled
def free_tree(tree: Tree, root: int) -> None:
    """Return a root and all its descendants to the pool."""
    free_below(tree, root)
    _free(tree, root)


@compiled
def _free(tree: Tree, node: int) -> None:
    tree.free[tree.available[0]] = node
    tree.available[0] += 1


@compiled
def clear_root(tree: Tree, root: int) -> None:
    """Remove everything that searches of ``root`` have found."""
    free_below(tree, root)
    tree.visits[root], tree.total[root], tree.expanded[root] = 0, 0.0, 0


@compiled
def child_of(tree: Tree, node: int, move: int) -> int:
    """Return the child that ``move`` leads to, or NONE."""
    child = tree.child[node]
    while child != NONE and tree.move[child] != move:
        child = tree.sibling[child]
    return child


@compiled
def advance_root(tree: Tree, root: int, move: int) -> int:
    """Return the root after ``move``. The new root keeps its subtree; all other nodes become free."""
    kept, previous, child = NONE, NONE, tree.child[root]
    while child != NONE:
        if tree.move[child] == move:
            kept = child
            if previous == NONE:
                tree.child[root] = tree.sibling[child]
            else:
                tree.sibling[previous] = tree.sibling[child]
            break
        previous, child = child, tree.sibling[child]
    colour = -np.int64(tree.colour[root])
    free_tree(tree, root)
    if kept == NONE:
        return new_node(tree, NONE, move, colour, 0.0, 0.0)
    tree.parent[kept], tree.sibling[kept] = NONE, NONE
    return kept


@compiled
def quality(tree: Tree, node: int) -> float:
    """Return Q of the move that leads to ``node``, for black. Virtual losses count."""
    return (tree.total[node] + tree.virtual[node] * tree.colour[node]) / (1.0 + tree.visits[node])


@compiled
def exploration(visits: int) -> float:
    """Return the exploration rate c of a node with this number of visits."""
    return 2.0 * (math.log((1.0 + visits + C_BASE) / C_BASE) + C_INIT)


@compiled
def puct(tree: Tree, child: int, scale: float) -> float:
    """Return the score of a child for the colour that moves to it.

    Args:
        scale: c sqrt(max(1, N - 1)) of the parent in selections.
    """
    return -tree.colour[child] * quality(tree, child) + scale * tree.prior[child] / (1.0 + tree.visits[child])


@compiled
def selection_scale(tree: Tree, node: int) -> float:
    """Return the factor of P / (1 + N) in the scores of a node's children."""
    return exploration(tree.visits[node]) * math.sqrt(max(1.0, tree.visits[node] - 1.0))


@compiled
def select_child(tree: Tree, node: int) -> int:
    """Return the child with the largest score, a new node if no search has selected it before.

    The lowest move wins a tie, and the largest prior wins a tie of moves without nodes. An expanded node has at least
    one legal move.
    """
    scale = selection_scale(tree, node)
    side = np.int64(tree.colour[node])
    chosen, chosen_score, chosen_move = NONE, -np.inf, 0
    child = tree.child[node]
    while child != NONE:
        score = puct(tree, child, scale)
        if score > chosen_score or (score == chosen_score and tree.move[child] < chosen_move):
            chosen, chosen_score, chosen_move = child, score, tree.move[child]
        child = tree.sibling[child]
    best = tree.best[node]
    if best == NONE:
        return chosen
    prior = tree.priors[node, best]
    score = side * tree.start[node] + scale * prior
    if score < chosen_score or (score == chosen_score and chosen_move < best):
        return chosen
    tree.priors[node, best] = NONE
    find_best(tree, node)
    return new_node(tree, node, best, -side, np.float64(prior), np.float64(tree.start[node]))


@compiled
def find_best(tree: Tree, node: int) -> None:
    """Find the move without a node that has the largest prior."""
    # As integers, priors have the same order, and a compiler can vectorise the maximum.
    order = tree.priors[node].view(np.int32)
    largest = order[0]
    for move in range(order.size):
        largest = max(largest, order[move])
    best = 0
    while order[best] != largest:
        best += 1
    tree.best[node] = best if largest >= 0 else NONE


@compiled
def expand(
    tree: Tree,
    node: int,
    policy: NDArray[np.float32],
    value: float,
    table: NDArray[np.int64],
    legal: NDArray[np.int8],
    penalty: float,
    allow_pass: bool,
) -> None:
    """Give a node the network's evaluation.

    Args:
        policy: (A,), probabilities of moves after the symmetry of the input.
        value: black's.
        table: (P,), the symmetry: the point that each point of the input comes from.
        legal: (A,), not zero for legal moves.
        penalty: reduces the first Q of children for the colour to move.
        allow_pass: whether pass may be selected though there are other legal moves.
    """
    priors, points = tree.priors[node], table.size
    for point in range(points):
        priors[table[point]] = policy[point]
    priors[points] = policy[points]
    total, others = np.float32(0.0), False
    for move in range(points + 1):
        if legal[move] != 0:
            total += priors[move]
            others |= move < points
    scale = np.float32(1.0) / total if total > 0 else np.float32(1.0)
    for move in range(points + 1):
        priors[move] = priors[move] * scale if legal[move] != 0 else np.float32(NONE)
    if others and not allow_pass:
        priors[points] = NONE
    tree.start[node] = min(max(value - penalty * tree.colour[node], -1.0), 1.0)
    tree.expanded[node] = 1
    find_best(tree, node)


@compiled
def back_up(tree: Tree, leaf: int, value: float) -> None:
    """Count one visit with black's ``value`` from a leaf to the root."""
    node = leaf
    while node != NONE:
        tree.total[node] += np.float32(value)
        tree.visits[node] += 1
        node = tree.parent[node]


@compiled
def add_virtual_loss(tree: Tree, leaf: int, change: int | np.integer[Any]) -> None:
    """Add (1) or revert (-1) a virtual loss from a leaf to the root."""
    node = leaf
    while node != NONE:
        tree.virtual[node] += change
        node = tree.parent[node]


@compiled
def mix_noise(tree: Tree, root: int, noise: NDArray[np.float64], mix: float) -> None:
    """Mix ``noise`` (A,) into the priors of an expanded root.

    Only moves that may be selected get noise, and their noise is normalised to sum 1.
    """
    priors = tree.priors[root]
    total, child = 0.0, tree.child[root]
    for move in range(priors.size):
        total += noise[move] if priors[move] >= 0 else 0.0
    while child != NONE:
        total += noise[tree.move[child]]
        child = tree.sibling[child]
    for move in range(priors.size):
        if priors[move] >= 0:
            priors[move] = (1.0 - mix) * priors[move] + mix * noise[move] / total
    child = tree.child[root]
    while child != NONE:
        tree.prior[child] = (1.0 - mix) * tree.prior[child] + mix * noise[tree.move[child]] / total
        child = tree.sibling[child]
    find_best(tree, root)


@compiled
def most_visited(tree: Tree, root: int, owner: NDArray[np.int8]) -> int:
    """Return the child with most visits, the larger score deciding ties, or NONE if no child was visited.

    Args:
        owner: (A,), moves whose entry is not EMPTY are left out.
    """
    scale = selection_scale(tree, root)
    chosen, chosen_visits, chosen_score = NONE, 0, 0.0
    child = tree.child[root]
    while child != NONE:
        visits, score = tree.visits[child], puct(tree, child, scale)
        if (
            visits > 0
            and owner[tree.move[child]] == EMPTY
            and (visits > chosen_visits or (visits == chosen_visits and score > chosen_score))
        ):
            chosen, chosen_visits, chosen_score = child, visits, score
        child = tree.sibling[child]
    return chosen


@allocating
def prune_visits(tree: Tree, root: int, owner: NDArray[np.int8]) -> None:
    """Reduce the visits of the root's children to the numbers that their final values justify.

    For each child but the most visited one, the number is the largest with which the child's score is at most the score
    of the most visited child, and at most its own visits. A child whose Q alone is above that score gets 0, as in the
    reference implementation.

    Args:
        owner: (A,), the visits of moves whose entry is not EMPTY become 0.
    """
    best = most_visited(tree, root, np.zeros(owner.size, np.int8))
    if best == NONE:
        return
    side, visits = tree.colour[root], tree.visits[root]
    rate = exploration(visits)
    limit = puct(tree, best, rate * math.sqrt(1.0 + visits))
    child = tree.child[root]
    while child != NONE:
        if owner[tree.move[child]] != EMPTY:
            tree.visits[child] = 0
        elif child != best:
            justified = rate * tree.prior[child] * math.sqrt(visits) / (limit - side * quality(tree, child))
            tree.visits[child] = max(0, int(min(float(tree.visits[child]), justified)))
        child = tree.sibling[child]


@allocating
def write_pi(tree: Tree, root: int, exponent: float, pi: NDArray[np.float32]) -> None:
    """Write the distribution of visits**exponent over moves into ``pi`` (A,); all on pass if no child has a visit."""
    pi[:] = 0.0
    total, child = 0.0, tree.child[root]
    while child != NONE:
        if tree.visits[child] > 0:
            weight = float(tree.visits[child]) ** exponent
            pi[tree.move[child]] = weight
            total += weight
        child = tree.sibling[child]
    if total == 0.0:
        pi[-1] = 1.0
    else:
        pi /= np.float32(total)
