"""Graph of a periodic structure: its nearest neighbours, and the reverse of each edge.

An edge j -> i has the vector ``pos[j] - pos[i] + offset @ cell``, where ``offset`` names the periodic image of the
neighbour j. All structures are periodic along the three vectors of their cell. Edges are sorted by target, then by
source and offset, so that all edges into an atom are contiguous.

A triplet k -> j -> i is a pair of edges that forms an angle. All pairs count, except an edge and its own reverse: k = i
without a periodic offset is left out, but images of i are other atoms.

Axes: N atoms; E edges.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CUTOFF = 6.0
"""Largest length of an edge in angstrom."""
NEIGHBOURS = 50
"""Most edges into an atom: the shortest ones. Of equal lengths, the lower source and then the lower offset count."""
SHORTEST = 1e-8
"""Shorter edges, in angstrom, are left out."""
MOST_PAIRS = 2**26
"""Largest number of pairs of atoms and images that are searched. A structure of 225 atoms needs about 2^21."""
Ints = NDArray[np.int64]


class Edges(NamedTuple):
    """Edges in the order of this module.

    Attributes:
        index_2E: (2, E) source j and target i of each edge.
        offset_E3: (E, 3) periodic image of the source.
    """

    index_2E: Ints
    offset_E3: Ints


def neighbours(pos_N3: NDArray[np.float64], cell_33: NDArray[np.float64]) -> Edges:
    """Return the edges from the nearest neighbours of each atom.

    Args:
        pos_N3: positions in angstrom; they may lie outside of the cell.
        cell_33: the rows are the vectors of the cell in angstrom.

    Raises:
        ValueError: a value is not finite, the cell has no volume or too many images, or no atom has a neighbour.
    """
    if not (np.isfinite(pos_N3).all() and np.isfinite(cell_33).all()):
        raise ValueError("a position or a vector of the cell is not finite")
    pairs = []
    for offset in _offsets(pos_N3, cell_33):
        vector_NN3 = pos_N3[None] - pos_N3[:, None] + np.array(offset) @ cell_33
        length_NN = np.sqrt((vector_NN3**2).sum(2))
        target, source = np.nonzero((length_NN <= CUTOFF) & (length_NN >= SHORTEST))
        pairs.append((target, source, length_NN[target, source], np.tile(offset, (len(target), 1))))
    target, source, length, offset_E3 = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    if not len(target):
        raise ValueError(f"no atom has a neighbour within {CUTOFF:g} angstrom")
    order = np.lexsort((*offset_E3.T[::-1], source, length, target))
    first_N = np.searchsorted(target[order], np.arange(len(pos_N3)))
    nearest = order[np.arange(len(order)) - first_N[target[order]] < NEIGHBOURS]
    return ordered(np.stack([source, target])[:, nearest], offset_E3[nearest])


def _offsets(pos_N3: NDArray[np.float64], cell_33: NDArray[np.float64]) -> list[tuple[int, ...]]:
    """Return all periodic images in which a neighbour can be."""
    volume = abs(np.linalg.det(cell_33))
    if volume < 1e-6:
        raise ValueError(f"the cell has a volume of {volume:g} cubic angstrom")
    inverse_33 = np.linalg.inv(cell_33)
    reach_3 = CUTOFF * np.sqrt((inverse_33**2).sum(0))  # the cutoff, divided by the distance of the cell's faces
    extent_3 = np.ptp(pos_N3 @ inverse_33, axis=0)
    most_3 = np.floor(reach_3 + extent_3 + 1e-9).astype(np.int64)
    if np.prod(2.0 * most_3 + 1) * len(pos_N3) ** 2 > MOST_PAIRS:
        raise ValueError(f"{len(pos_N3)} atoms in a cell of {volume:g} cubic angstrom have too many images to search")
    return list(itertools.product(*(range(-most, most + 1) for most in most_3.tolist())))


def ordered(index_2E: Ints, offset_E3: Ints) -> Edges:
    """Return the edges in the order of this module."""
    order = np.lexsort((*offset_E3.T[::-1], index_2E[0], index_2E[1]))
    return Edges(index_2E[:, order], offset_E3[order])


def reverse_edges(edges: Edges) -> Ints:
    """Return, for each edge j -> i, the index of the edge i -> j with the opposite offset, or -1; (E,)."""
    (source, target), offset_E3 = edges
    atoms, reach = int(edges.index_2E.max()) + 1, int(np.abs(offset_E3).max())

    def number(target_E: Ints, source_E: Ints, offset_E3: Ints) -> Ints:
        value = target_E * atoms + source_E
        for axis in range(3):
            value = value * (2 * reach + 1) + offset_E3[:, axis] + reach
        return value

    own, opposite = number(target, source, offset_E3), number(source, target, -offset_E3)
    found = np.minimum(np.searchsorted(own, opposite), len(own) - 1)
    return np.where(own[found] == opposite, found, -1)


def count_triplets(edges: Edges) -> int:
    """Return the number of triplets."""
    source, target = edges.index_2E
    into_N = np.bincount(target, minlength=int(source.max()) + 1)
    return int(into_N[source].sum() - (reverse_edges(edges) >= 0).sum())
