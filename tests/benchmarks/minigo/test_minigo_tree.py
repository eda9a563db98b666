"""PUCT, virtual losses, noise and pruning, against numbers worked by hand and a search over all moves in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.minigo.engine import BLACK, WHITE
from benchmarks.minigo.features import symmetry_tables
from benchmarks.minigo.randomness import write_dirichlet
from benchmarks.minigo.tree import (
    NONE,
    Tree,
    add_virtual_loss,
    advance_root,
    back_up,
    child_of,
    clear_root,
    enlarged,
    expand,
    free_tree,
    make_tree,
    mix_noise,
    most_visited,
    new_node,
    prune_visits,
    quality,
    select_child,
    write_pi,
)

SIZE, MOVES = 2, 5
PRIORS = np.array([0.5, 0.3, 0.1, 0.06, 0.04], np.float32)
ALL_LEGAL, NO_OWNER = np.ones(MOVES, np.int8), np.zeros(MOVES, np.int8)
TABLES = symmetry_tables(SIZE)


def rooted(
    side: int = BLACK, value: float = 0.1, policy: np.ndarray = PRIORS, legal: np.ndarray = ALL_LEGAL, **named: bool
) -> tuple[Tree, int]:
    """Return a tree with an expanded root that was visited once."""
    tree = make_tree(SIZE, 64)
    root = new_node(tree, NONE, NONE, side, 0.0, 0.0)
    expand(tree, root, policy, value, TABLES[0], legal, 0.2, named.get("allow_pass", True))
    back_up(tree, root, value)
    return tree, root


def test_scores_are_those_worked_by_hand():
    tree, root = rooted()
    # Black's children begin with W = 0.1 - 0.2. The score of move 0 is -0.1 + 2.5 * 0.5, the largest.
    first = select_child(tree, root)
    assert tree.move[first] == 0
    assert quality(tree, first) == pytest.approx(-0.1)
    back_up(tree, first, -0.9)
    assert quality(tree, first) == pytest.approx((-0.1 - 0.9) / 2)
    # Now N = 2, so c = 2 (ln(19655 / 19652) + 1.25) = 2.500305. Move 0: -0.5 + 2.500305 * 0.5 / 2 = 0.125076,
    # move 1: -0.1 + 2.500305 * 0.3 = 0.650092.
    second = select_child(tree, root)
    assert tree.move[second] == 1
    back_up(tree, second, -1.0)
    # N = 3, c sqrt(2) = 2.500407 * 1.414214 = 3.536110. Move 0: -0.5 + 0.884027 = 0.384027,
    # move 1: -0.55 + 3.536110 * 0.15 = -0.019583, move 2: -0.1 + 0.353611 = 0.253611.
    assert select_child(tree, root) == first


def test_the_first_quality_of_children_is_for_the_colour_to_move_and_at_most_1():
    for side, value, expected in ((BLACK, 0.1, -0.1), (WHITE, 0.1, 0.3), (BLACK, -0.95, -1.0), (WHITE, 0.95, 1.0)):
        tree, root = rooted(side, value)
        assert quality(tree, select_child(tree, root)) == pytest.approx(expected)


@pytest.mark.parametrize("side", [BLACK, WHITE])
def test_selections_are_those_of_a_comparison_of_all_moves(side):
    generator = np.random.default_rng(0)
    policy = generator.dirichlet(np.ones(MOVES)).astype(np.float32)
    tree, root = rooted(side, 0.3, policy)
    visits, total = np.zeros(MOVES), np.full(MOVES, np.float32(0.3 - 0.2 * side), np.float64)
    for count in range(1, 200):
        c = 2 * (math.log((1 + count + 19652) / 19652) + 1.25)
        scores = side * total / (1 + visits) + c * math.sqrt(max(1, count - 1)) * policy / (1 + visits)
        child = select_child(tree, root)
        move = tree.move[child]
        assert move == scores.argmax()
        value = generator.uniform(-1, 1)
        back_up(tree, child, value)
        visits[move] += 1
        total[move] += value
    assert (visits > 0).sum() >= 3


def test_white_prefers_low_values():
    for side in (BLACK, WHITE):
        tree, root = rooted(side, 0.0, np.full(MOVES, 0.2, np.float32))
        for _ in range(100):
            child = select_child(tree, root)
            back_up(tree, child, 0.5 if tree.move[child] == 3 else -0.5)
        best = most_visited(tree, root, NO_OWNER)
        assert (tree.move[best] == 3) == (side == BLACK)


def test_illegal_moves_are_never_selected_and_priors_of_legal_moves_have_sum_1():
    legal = np.array([0, 1, 0, 1, 1], np.int8)
    tree, root = rooted(legal=legal)
    assert tree.priors[root].tolist() == pytest.approx([-1, 0.75, -1, 0.15, 0.1])
    for _ in range(50):
        child = select_child(tree, root)
        assert legal[tree.move[child]]
        back_up(tree, child, -1.0)


def test_pass_is_selected_only_without_other_moves_if_it_is_not_allowed():
    tree, root = rooted(allow_pass=False)
    moves = set()
    for _ in range(200):
        child = select_child(tree, root)
        back_up(tree, child, -1.0)
        moves.add(int(tree.move[child]))
    assert moves == {0, 1, 2, 3}
    tree, root = rooted(allow_pass=False, legal=np.array([0, 0, 0, 0, 1], np.int8))
    assert tree.move[select_child(tree, root)] == 4


@pytest.mark.parametrize("symmetry", range(8))
def test_priors_are_rotated_back(symmetry):
    tree = make_tree(SIZE, 4)
    root = new_node(tree, NONE, NONE, BLACK, 0.0, 0.0)
    seen = PRIORS.copy()
    for point in range(4):  # the network sees the value of point table[p] at p
        seen[point] = PRIORS[TABLES[symmetry, point]]
    expand(tree, root, seen, 0.0, TABLES[symmetry], ALL_LEGAL, 0.2, True)
    assert tree.priors[root].tolist() == pytest.approx(PRIORS.tolist())


def test_a_virtual_loss_counts_against_the_colour_that_moves_and_is_reverted_exactly():
    tree, root = rooted()
    child = select_child(tree, root)
    expand(tree, child, PRIORS, 0.123, TABLES[0], ALL_LEGAL, 0.2, True)
    back_up(tree, child, 0.123)
    leaf = select_child(tree, child)
    before = tree.total.copy()
    qualities = [quality(tree, node) for node in (root, child, leaf)]
    add_virtual_loss(tree, leaf, 1)
    add_virtual_loss(tree, leaf, 1)
    # Black is to move at the root and at the leaf, white at the child.
    changes = [2 / (1 + 2), -2 / (1 + 1), 2 / (1 + 0)]
    found = [quality(tree, node) for node in (root, child, leaf)]
    assert found == pytest.approx([q + change for q, change in zip(qualities, changes, strict=True)])
    assert tree.visits[leaf] == 0
    add_virtual_loss(tree, leaf, -1)
    add_virtual_loss(tree, leaf, -1)
    assert np.array_equal(tree.total, before)
    assert [quality(tree, node) for node in (root, child, leaf)] == qualities


def test_noise_changes_only_legal_moves_and_keeps_the_sum():
    legal = np.array([1, 1, 0, 1, 1], np.int8)
    tree, root = rooted(legal=legal)
    child = select_child(tree, root)
    before = np.where(legal == 1, PRIORS, 0) / PRIORS[legal == 1].sum()
    noise = np.array([1.0, 2.0, 100.0, 0.0, 1.0])
    mix_noise(tree, root, noise, 0.3)
    expected = 0.7 * before + 0.3 * np.array([0.25, 0.5, 0, 0, 0.25])
    assert tree.prior[child] == pytest.approx(expected[0])
    assert tree.priors[root].tolist() == pytest.approx([-1, expected[1], -1, expected[3], expected[4]])
    assert expected.sum() == pytest.approx(1)


@pytest.mark.parametrize("alpha", [0.03, 0.135, 2.0])
def test_noise_has_the_moments_of_the_dirichlet_distribution(alpha):
    stream, noise, count = np.array([7], np.uint64), np.empty(10), 20_000
    drawn = np.empty((count, 10))
    for row in drawn:
        write_dirichlet(stream, alpha, noise)
        row[:] = noise / noise.sum()
    variance = 0.1 * 0.9 / (10 * alpha + 1)
    assert drawn.mean(0) == pytest.approx(np.full(10, 0.1), abs=5 * math.sqrt(variance / count))
    assert drawn.var(0) == pytest.approx(np.full(10, variance), rel=0.1)


def visited(side: int, counts: list[int], values: list[float]) -> tuple[Tree, int]:
    """Return a root whose children have these visits and, as far as float32 allows, these values of Q."""
    tree, root = rooted(side, 0.0)
    for move, (count, value) in enumerate(zip(counts, values, strict=True)):
        child = new_node(tree, root, move, -side, PRIORS[move], 0.0)
        tree.visits[child], tree.total[child] = count, value * (1 + count)
    tree.visits[root] = 1 + sum(counts)
    return tree, root


@pytest.mark.parametrize("side", [BLACK, WHITE])
def test_pruning_leaves_the_visits_that_values_justify(side):
    counts, values = [60, 30, 9, 0], [0.5 * side, 0.4 * side, -0.9 * side, 0.0]
    tree, root = visited(side, counts, values)
    # N = 100, c = 2 (ln(19753 / 19652) + 1.25) = 2.510253. Limit: 0.5 + 2.510253 sqrt(101) * 0.5 / 61 = 0.706783.
    # Move 1: 2.510253 * 10 * 0.3 / (0.706783 - 0.4) = 24.5, move 2: 2.510253 / (0.706783 + 0.9) = 1.56.
    prune_visits(tree, root, NO_OWNER)
    assert [int(tree.visits[child_of(tree, root, move)]) for move in range(4)] == [60, 24, 1, 0]
    pi = np.empty(MOVES, np.float32)
    write_pi(tree, root, 1.0, pi)
    assert pi.tolist() == pytest.approx([60 / 85, 24 / 85, 1 / 85, 0, 0])
    write_pi(tree, root, 0.98, pi)
    weights = np.array([60, 24, 1, 0, 0]) ** 0.98
    assert pi.tolist() == pytest.approx((weights / weights.sum()).tolist())


def test_pruning_never_raises_visits_and_removes_those_in_pass_alive_points():
    tree, root = visited(BLACK, [50, 3, 2, 1], [0.1, 0.1, 0.1, 0.9])
    prune_visits(tree, root, np.array([0, 1, 0, 0, 0], np.int8))
    # Move 3 has a Q above the limit of 0.40, and the bound is negative.
    assert [int(tree.visits[child_of(tree, root, move)]) for move in range(4)] == [50, 0, 2, 0]
    prune_visits(tree, root, np.array([1, 1, 1, 1, 0], np.int8))
    pi = np.empty(MOVES, np.float32)
    write_pi(tree, root, 1.0, pi)
    assert pi.tolist() == [0, 0, 0, 0, 1]


def test_the_larger_score_decides_between_equal_visits():
    tree, root = visited(WHITE, [5, 5, 4, 0], [0.2, -0.9, -1.0, 0.0])
    assert tree.move[most_visited(tree, root, NO_OWNER)] == 1
    assert tree.move[most_visited(tree, root, np.array([1, 1, 0, 0, 0], np.int8))] == 2
    assert most_visited(tree, root, np.ones(MOVES, np.int8)) == NONE


def grown(tree: Tree, root: int, count: int) -> None:
    """Add nodes by searches with random values."""
    generator = np.random.default_rng(1)
    for _ in range(count):
        node = root
        while tree.expanded[node]:
            node = select_child(tree, node)
        value = generator.uniform(-1, 1)
        expand(tree, node, PRIORS, value, TABLES[0], ALL_LEGAL, 0.2, True)
        back_up(tree, node, value)


def reached(tree: Tree, top: int) -> list[int]:
    """Return ``top`` and all its descendants."""
    found, child = [top], tree.child[top]
    while child != NONE:
        found += reached(tree, child)
        child = tree.sibling[child]
    return found


def test_a_move_keeps_its_subtree_and_frees_all_other_nodes():
    tree, root = rooted()
    tree = enlarged(_filled(tree, root))
    grown(tree, root, 60)
    kept = child_of(tree, root, 1)
    subtree, visits = reached(tree, kept), int(tree.visits[kept])
    assert 1 < len(subtree) < len(reached(tree, root))
    new = advance_root(tree, root, 1)
    assert new == kept
    assert sorted(reached(tree, new)) == sorted(subtree)
    assert (tree.visits[new], tree.parent[new], tree.colour[new]) == (visits, NONE, WHITE)
    capacity = len(tree.parent)
    free = tree.free[: tree.available[0]].tolist()
    assert sorted(free + subtree) == list(range(capacity))
    clear_root(tree, new)
    assert (tree.available[0], tree.visits[new], tree.expanded[new]) == (capacity - 1, 0, 0)
    free_tree(tree, new)
    assert tree.available[0] == capacity


def _filled(tree: Tree, root: int) -> Tree:
    grown(tree, root, int(tree.available[0]))
    assert tree.available[0] == 0
    return tree


def test_a_move_without_node_gets_a_new_root():
    tree, root = rooted()
    new = advance_root(tree, root, 4)
    assert (tree.visits[new], tree.expanded[new], tree.parent[new], tree.child[new]) == (0, 0, NONE, NONE)
    assert tree.available[0] == len(tree.parent) - 1
