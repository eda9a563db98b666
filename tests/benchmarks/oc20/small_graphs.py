"""Small graphs for the tests of OpenCatalyst's network, built by loops that share no code with the suite's."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

CUTOFF = 6.0


def graph_of(
    position_A3: Tensor, cell_33: Tensor | None = None, padding: tuple[int, int] = (1, 1)
) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch with one structure whose neighbours are all atoms within the cutoff.

    Args:
        cell_33: rows are the lattice vectors; None for a molecule in vacuum.
        padding: atoms and edges of padding.
    """
    atoms, generator = len(position_A3), torch.Generator().manual_seed(atoms_seed(position_A3))
    steps = [(0, 0, 0)] if cell_33 is None else list(itertools.product((-1, 0, 1), repeat=3))
    edges = []
    for target, source, step in itertools.product(range(atoms), range(atoms), steps):
        shift = torch.zeros(3, dtype=torch.float64)
        if cell_33 is not None:
            shift = torch.tensor(step, dtype=torch.float64) @ cell_33
        distance = float((position_A3[source] - position_A3[target] + shift).norm())
        if 0 < distance <= CUTOFF:
            edges.append((source, target, step, shift))
    reverse = [-1] * len(edges)
    for edge, (j, i, step, _) in enumerate(edges):
        for other, (k, centre, back, _) in enumerate(edges):
            if centre == j and k == i and all(one == -two for one, two in zip(step, back, strict=True)):
                reverse[edge] = other
    more_atoms, more_edges = padding
    last_atom = atoms + more_atoms - 1
    far = torch.tensor([CUTOFF, 0.0, 0.0], dtype=torch.float64)
    edges += [(last_atom, last_atom, (0, 0, 0), far)] * more_edges
    reverse += [-1] * more_edges
    number_A = torch.randint(1, 90, (atoms,), generator=generator, dtype=torch.int32)
    force_A3 = torch.randn(atoms, 3, generator=generator, dtype=torch.float64)
    free_A = (torch.arange(atoms) % 3 > 0).float()

    def padded(real: Tensor) -> Tensor:
        return torch.cat([real, real.new_zeros(more_atoms, *real.shape[1:])])

    return {
        "atomic_number": padded(number_A),
        "position": padded(position_A3),
        "force": padded(force_A3),
        "free": padded(free_A),
        "edge_source": torch.tensor([edge[0] for edge in edges], dtype=torch.int32),
        "edge_target": torch.tensor([edge[1] for edge in edges], dtype=torch.int32),
        "edge_shift": torch.stack([edge[3] for edge in edges]),
        "edge_reverse": torch.tensor(reverse, dtype=torch.int32),
        "samples": torch.ones(()),
    }


def atoms_seed(position_A3: Tensor) -> int:
    """Return a seed that is a function of the positions."""
    return math.floor(1e6 * float(position_A3.abs().sum()))


def molecule(atoms: int, seed: int) -> Tensor:
    """Return positions (A, 3) fp64 in angstrom, at least 1 angstrom apart."""
    generator, found = torch.Generator().manual_seed(seed), [torch.zeros(3, dtype=torch.float64)]
    while len(found) < atoms:
        candidate = 4 * torch.rand(3, generator=generator, dtype=torch.float64)
        if all(float((candidate - other).norm()) > 1 for other in found):
            found.append(candidate)
    return torch.stack(found)


def joined(graphs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return one micro-batch with all structures; the padding of each one stays where it is."""
    atoms = list(itertools.accumulate([len(graph["position"]) for graph in graphs], initial=0))
    edges = list(itertools.accumulate([len(graph["edge_shift"]) for graph in graphs], initial=0))
    offsets = {"edge_source": atoms, "edge_target": atoms, "edge_reverse": edges}
    made = {}
    for name in graphs[0]:
        if name == "samples":
            made[name] = torch.tensor(float(len(graphs)))
            continue
        parts = [graph[name] for graph in graphs]
        if name in offsets:
            parts = [
                torch.where(part < 0, part, part + offset) for part, offset in zip(parts, offsets[name], strict=False)
            ]
        made[name] = torch.cat(parts)
    return made
