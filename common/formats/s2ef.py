"""Published files of Open Catalyst's task S2EF: structures of atoms, each with an energy and forces.

- Trajectories: ``NAME.extxyz`` and ``NAME.txt``, each also with ``.xz``: structures in the extended XYZ format, and for
  each one a line ``random<sid>,frame<fid>,<reference energy in eV>``.
- Graphs: ``*.lmdb``, with pickled graphs of PyTorch Geometric 1.7, with or without edges.

A structure is a dict of arrays with the names of the graphs: those of :data:`FIELDS`, and in a graph with edges
``edge_index`` (2, E) and ``cell_offsets`` (E, 3), both int64.

Axes: N atoms; E edges.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from common.formats import extxyz
from common.formats.lmdb_file import LmdbFile
from common.untrusted.graph_pickle import load_graph
from common.untrusted.regular_file import lines, open_regular

EXTXYZ, PACKED, LMDB = ".extxyz", ".xz", ".lmdb"
"""Suffixes of trajectories, of packed files, and of graphs."""
COLUMNS = {"species": "S:1", "pos": "R:3", "move_mask": "L:1", "tags": "I:1", "forces": "R:3"}
"""Columns of an atom in a trajectory; ``move_mask`` is true for a free atom."""
FIELDS = ("pos", "atomic_numbers", "cell", "force", "fixed", "tags", "y", "sid", "fid")
"""Positions (N, 3), atomic numbers (N,), the vectors of the cell as rows (3, 3), forces (N, 3), 1 for a fixed atom and
tags (N,), the energy relative to the reference energy, and the numbers of the system and of its frame, all ()."""
_LONGEST_LINE = 2**16
_SYSTEM = re.compile(r"random(\d+),frame(\d+),(\S+)")
Fields = dict[str, NDArray[Any]]


def structures(path: Path) -> Iterator[Fields]:
    """Yield the structures of a file; a structure with wrong values raises when it is reached.

    Raises:
        ValueError: the file is truncated or damaged, has other data, or a graph lacks a field.
        KeyError: a structure of a trajectory has no such property.
        OSError, EOFError, lzma.LZMAError: the file cannot be read, or its packing is damaged.
        DataError: a line is too long, or a pickle asks for other classes than graphs.
    """
    return _graphs(path) if path.suffix == LMDB else _trajectory(path)


def _trajectory(path: Path) -> Iterator[Fields]:
    systems = path.with_name(f"{path.name.removesuffix(PACKED).removesuffix(EXTXYZ)}.txt{PACKED}")
    if not systems.exists():
        systems = systems.with_suffix("")
    with _opened(path) as frames, _opened(systems) as names:
        systems_of = lines(systems, names, _LONGEST_LINE)
        for frame in extxyz.frames(path, frames, COLUMNS):
            system = _SYSTEM.fullmatch(next(systems_of, b"").decode().strip())
            if system is None:
                raise ValueError(f"{systems.name} has no line random<sid>,frame<fid>,<energy> for it")
            yield {
                "pos": frame.columns["pos"],
                "atomic_numbers": frame.columns["species"],
                "cell": frame.cell_33,
                "force": frame.columns["forces"],
                "y": np.array(float(frame.properties["energy"]) - float(system[3])),
                "fixed": ~frame.columns["move_mask"],
                "tags": frame.columns["tags"],
                "sid": np.array(int(system[1])),
                "fid": np.array(int(system[2])),
            }
        if next(systems_of, None) is not None:
            raise ValueError(f"{systems.name} has more lines than {path.name} structures: it is truncated")


def _opened(path: Path) -> BinaryIO:
    file = open_regular(path)
    return lzma.open(file) if path.suffix == PACKED else file  # type: ignore[return-value]


def _graphs(path: Path) -> Iterator[Fields]:
    with closing(LmdbFile(path)) as file:
        for index in range(file.length):
            graph = load_graph(file.read(index), f"{path}: sample {index}")
            missing = [name for name in FIELDS if name not in graph]
            if missing:
                raise ValueError(f"the graph has no {missing[0]}")
            fields = {name: np.asarray(graph[name]) for name in FIELDS}
            fields |= {name: fields[name].reshape(()) for name in ("y", "sid", "fid")}
            fields["cell"] = fields["cell"].reshape(3, 3)
            atoms = fields["atomic_numbers"].size
            if fields["pos"].shape != (atoms, 3):
                raise ValueError(f"pos has the shape {fields['pos'].shape}, not {(atoms, 3)}")
            if not np.isin(fields["atomic_numbers"], np.arange(1, len(extxyz.SYMBOLS) + 1)).all():
                raise ValueError(f"an atomic number is not in 1 to {len(extxyz.SYMBOLS)}")
            yield fields | (_edges(graph, atoms) if "edge_index" in graph else {})


def _edges(graph: dict[str, Any], atoms: int) -> Fields:
    """Return the edges of a graph after a check of their types, shapes and atoms."""
    index_2E, offset_E3 = np.asarray(graph["edge_index"]), np.asarray(graph.get("cell_offsets"))
    edges = index_2E.size // 2
    if index_2E.shape != (2, edges) or offset_E3.shape != (edges, 3) or not (index_2E.dtype == offset_E3.dtype == int):
        raise ValueError("edge_index and cell_offsets are not int64 of shape (2, E) and (E, 3)")
    if edges and (index_2E.min() < 0 or index_2E.max() >= atoms):
        raise ValueError(f"an edge has an atom outside of 0 to {atoms - 1}")
    return {"edge_index": index_2E, "cell_offsets": offset_E3}
