"""Small structures on disk, in both raw layouts, and loops that define neighbours and triplets."""

from __future__ import annotations

import copyreg
import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import pytest
import torch
import torch_geometric.data.data
from numpy.typing import NDArray

from benchmarks.oc20.prepare import prepare
from benchmarks.oc20.synthetic import SyntheticSlabs, generate
from common.formats import lmdb_file

TRAIN, EVAL = 23, 11
SLABS = SyntheticSlabs(train=TRAIN, eval=EVAL, columns=(1, 2), layers=(1, 2), spacing=4.2)
PROPERTIES = "Properties=species:S:1:pos:R:3:move_mask:L:1:tags:I:1:forces:R:3"
TWO = f"""3
Lattice="4.0 0 0 0 8.0 0 0 0 30.0" {PROPERTIES} energy=-7.25 free_energy=-7.5 pbc="T T T"
Cu 0.0 0.0 0.0 F 0 0.5 -0.25 0.125
Cu 0.5 4.0 1.0 T 1 -1.5 0.0 2.0
H 0.5 4.0 -1.5 T 2 1.0 0.25 -2.125
1
Lattice="5.0 0 0 0 5.0 0 0 0 5.0" {PROPERTIES} energy=3.5 pbc="T T T"
Pt 0.25 0.5 0.75 T 1 0.0 0.0 0.0
"""
SYSTEMS = "random2447361,frame12,-10.5\nrandom7,frame0,1.25\n"


def prepared(root: Path) -> Path:
    """Return a folder of prepared synthetic structures."""
    generate(root.with_name(f"{root.name}-raw"), SLABS)
    prepare(root.with_name(f"{root.name}-raw"), root)
    return root


def write_trajectories(root: Path, frames: str = TWO, systems: str = SYSTEMS) -> Path:
    """Write the frames as both splits, in the published layout."""
    for folder in ("s2ef_train_2M", "s2ef_val_id"):
        (root / folder / folder).mkdir(parents=True)
        (root / folder / folder / "0.extxyz").write_text(frames)
        (root / folder / folder / "0.txt").write_text(systems)
    return root


def neighbours_by_loops(pos: NDArray[np.float64], cell: NDArray[np.float64], images: int) -> list[tuple]:
    """Return (target, source, offset) of the nearest 50 neighbours of each atom within 6 angstrom, sorted."""
    edges = []
    for i in range(len(pos)):
        found = []
        for j in range(len(pos)):
            for o in itertools.product(range(-images, images + 1), repeat=3):
                vector = pos[j] - pos[i] + o[0] * cell[0] + o[1] * cell[1] + o[2] * cell[2]
                length = float(np.sqrt((vector * vector).sum()))
                if 0 < length <= 6:
                    found.append((length, j, o))
        edges += [(i, j, o) for _, j, o in sorted(found)[:50]]
    return sorted(edges)


def triplets_by_loops(edges: list[tuple]) -> list[tuple[int, int]]:
    """Return the pairs (edge j -> i, edge k -> j) without those of an edge and its own reverse, sorted."""
    return [
        (first, second)
        for first, (i, j, o) in enumerate(edges)
        for second, (centre, k, p) in enumerate(edges)
        if centre == j and not (k == i and all(a + b == 0 for a, b in zip(o, p, strict=True)))
    ]


class _Graph:
    """A graph of PyTorch Geometric 1: its state is the dict of its attributes."""

    __module__, __qualname__ = "torch_geometric.data.data", "Data"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return copyreg.__newobj__, (_Graph,), self.__dict__  # type: ignore[attr-defined]


_Graph.__name__ = "Data"


@contextmanager
def first_version() -> Iterator[None]:
    """Replace PyTorch Geometric's class, so that pickles name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_geometric.data.data, "Data", _Graph)
        yield


def graph(**changes: object) -> dict[str, object]:
    """Return the fields of the first structure of :data:`TWO` as the official preprocessing makes them."""
    pos = torch.tensor([[0.0, 0, 0], [0.5, 4, 1], [0.5, 4, -1.5]])
    cell = np.diag([4.0, 8.0, 30.0])
    edges = neighbours_by_loops(pos.double().numpy(), cell, 2)[::-1]  # the official order is another one
    fields = {
        "x": None,
        "edge_index": torch.tensor([[j, i] for i, j, _ in edges]).T,  # not contiguous
        "cell_offsets": torch.tensor([o for _, _, o in edges]),
        "pos": pos,
        "atomic_numbers": torch.tensor([29.0, 29, 1]),
        "cell": torch.tensor(cell, dtype=torch.float32).view(1, 3, 3),
        "natoms": 3,
        "force": torch.tensor([[0.5, -0.25, 0.125], [-1.5, 0, 2], [1, 0.25, -2.125]]),
        "y": np.float64(3.25),
        "fixed": torch.tensor([1.0, 0, 0]),
        "tags": torch.tensor([0, 1, 2]),
        "sid": torch.tensor([2447361]),
        "fid": 12,
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def pickled(fields: dict[str, object]) -> bytes:
    """Return a pickled graph of PyTorch Geometric 1."""
    made = _Graph()
    made.__dict__.update(fields)
    with first_version():
        return pickle.dumps(made, protocol=4)


def write_graphs(root: Path, *values: bytes) -> Path:
    """Write LMDB files of the official preprocessing, with the same samples in both splits."""
    for folder in ("2M/train", "all/val_id"):
        (root / folder).mkdir(parents=True)
        lmdb_file.write(root / folder / "data.0000.lmdb", values)
    return root
