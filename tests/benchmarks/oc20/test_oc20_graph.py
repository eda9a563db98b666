"""Neighbours, reverse edges and triplets of periodic structures against loops, and structures without a graph."""

from __future__ import annotations

import numpy as np
import pytest
import small_slabs

from benchmarks.oc20.graph import Edges, count_triplets, neighbours, reverse_edges


def listed(edges: Edges) -> list[tuple]:
    """Return (target, source, offset) of each edge."""
    (source, target), offsets = edges
    return [(int(i), int(j), tuple(map(int, o))) for i, j, o in zip(target, source, offsets, strict=True)]


def tilted(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of 2 or 3 atoms, some of them outside of their cell, and the cell, which is oblique."""
    random = np.random.default_rng(seed)
    cell = np.diag(random.uniform(3, 6, 3)) + random.uniform(-1, 1, (3, 3))
    return random.uniform(-4, 10, (int(random.integers(2, 4)), 3)), cell


@pytest.mark.parametrize("seed", range(4))
def test_neighbours_are_those_of_a_loop_over_images(seed: int) -> None:
    """Some of these atoms have more than 50 neighbours."""
    pos, cell = tilted(seed)
    assert listed(neighbours(pos, cell)) == small_slabs.neighbours_by_loops(pos, cell, 9)


def test_neighbours_in_a_very_oblique_cell_are_those_of_a_loop() -> None:
    """Along the first vector, the faces of the cell are half as far apart as the vector is long."""
    pos, cell = np.zeros((1, 3)), np.array([[4.0, 0, 0], [7, 4, 0], [0, 0, 20]])
    assert listed(neighbours(pos, cell)) == small_slabs.neighbours_by_loops(pos, cell, 4)


def test_of_equally_near_neighbours_the_lower_source_and_offset_stay() -> None:
    """Each atom of this lattice has 32 nearer neighbours, and then 24 at the same distance."""
    pos, cell = np.array([[0.0, 0, 0], [2.5, 0, 0]]), np.diag([5, 2.5, 2.5])
    found = listed(neighbours(pos, cell))
    assert len(found) == 100
    assert found == small_slabs.neighbours_by_loops(pos, cell, 3)


@pytest.mark.parametrize("seed", range(4))
def test_reverse_edges_and_triplets_are_those_of_a_loop_over_pairs_of_edges(seed: int) -> None:
    """Beyond 50 neighbours, some edges have no reverse edge."""
    edges = neighbours(*tilted(seed))
    number = {edge: index for index, edge in enumerate(listed(edges))}
    opposite = [(j, i, tuple(-step for step in offset)) for i, j, offset in number]
    assert reverse_edges(edges).tolist() == [number.get(edge, -1) for edge in opposite]
    assert count_triplets(edges) == len(small_slabs.triplets_by_loops(listed(edges)))


def test_images_of_an_atom_are_other_atoms() -> None:
    """An atom in a cube of 5 angstrom has 6 images as neighbours; an edge has an angle with all but its reverse."""
    edges = neighbours(np.zeros((1, 3)), np.eye(3) * 5)
    assert len(listed(edges)) == 6
    assert count_triplets(edges) == 6 * 5


def test_a_molecule_in_vacuum_has_no_angle_back_to_its_start() -> None:
    """Three atoms in a row: j -> i and k -> j with k = i are left out, so each middle edge has one angle."""
    edges = neighbours(np.array([[0.0, 0, 0], [4, 0, 0], [8, 0, 0]]), np.eye(3) * 40)
    assert [edge[:2] for edge in listed(edges)] == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert reverse_edges(edges).tolist() == [1, 0, 3, 2]
    assert count_triplets(edges) == 2


@pytest.mark.parametrize(
    ("pos", "cell", "complaint"),
    [
        (np.zeros((1, 3)), np.eye(3) * 7, "no atom has a neighbour within 6 angstrom"),
        (np.array([[0, np.nan, 0]]), np.eye(3) * 5, "is not finite"),
        (np.zeros((1, 3)), np.diag([5.0, np.inf, 5]), "is not finite"),
        (np.zeros((1, 3)), np.diag([5.0, 5, 0]), "the cell has a volume of 0 cubic angstrom"),
        (np.zeros((9, 3)), np.eye(3) * 0.05, "9 atoms in a cell of 0.000125 cubic angstrom have too many images"),
    ],
    ids=["alone", "position", "vector", "flat", "tiny"],
)
def test_a_structure_without_a_graph_is_an_error(pos: np.ndarray, cell: np.ndarray, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        neighbours(pos, cell)
