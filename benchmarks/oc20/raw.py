"""Raw data of OpenCatalyst: the published trajectories, or the LMDB files of the official preprocessing.

Each split has a folder with one of the names in :data:`FOLDERS`, anywhere below the raw folder, with

- ``NAME.extxyz`` and ``NAME.txt``, or both with ``.xz``: structures in the extended XYZ format, and for each one a line
  ``random<sid>,frame<fid>,<reference energy in eV>``;
- or ``*.lmdb``, with pickled graphs of PyTorch Geometric 1.7, with or without edges.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from benchmarks.oc20.graph import NEIGHBOURS, SHORTEST, Edges, neighbours, ordered
from benchmarks.oc20.samples import Structure
from common.data.raw_layout import find_file, fingerprint_of, packed_hint
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats import extxyz
from common.formats.extxyz import SYMBOLS
from common.formats.lmdb_file import LmdbFile
from common.formats.raw_files import listed
from common.untrusted.graph_pickle import load_graph
from common.untrusted.regular_file import lines, open_regular

FOLDERS = {"train": ("train", "s2ef_train_2M"), "eval": ("val_id", "s2ef_val_id")}
EXTXYZ, PACKED, LMDB = ".extxyz", ".xz", ".lmdb"
SUFFIXES = (EXTXYZ, EXTXYZ + PACKED, LMDB)
"""Suffixes of the files, the first one of which in a folder counts."""
COLUMNS = {"species": "S:1", "pos": "R:3", "move_mask": "L:1", "tags": "I:1", "forces": "R:3"}
"""Columns of an atom; ``move_mask`` is true for a free atom."""
GRAPH_FIELDS = ("pos", "atomic_numbers", "cell", "force", "fixed", "tags", "y", "sid", "fid")
_LONGEST_LINE = 2**16
_SYSTEM = re.compile(r"random(\d+),frame(\d+),(\S+)")


def structures(path: Path) -> Iterator[Structure]:
    """Yield the structures of a file, with their edges.

    Raises:
        DataError: the file is truncated or damaged, has other data, asks for other classes than graphs, or a structure
            has no neighbours. The message has the number of the structure.
    """
    number = 1
    try:
        for structure in _in_lmdb(path) if path.suffix == LMDB else _in_trajectory(path):
            yield structure
            number += 1
    except KeyError as error:
        raise DataError(f"{path}: structure {number} has no {error.args[0]}; fetch the file again") from error
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path}: structure {number}: {error}; fetch the file again") from error


def _in_trajectory(path: Path) -> Iterator[Structure]:
    packed = PACKED if path.suffix == PACKED else ""
    systems = path.with_name(f"{path.name.removesuffix(EXTXYZ + packed)}.txt{packed}")
    with _opened(path) as frames, _opened(systems) as names:
        systems_of = lines(systems, names, _LONGEST_LINE)
        for frame in extxyz.frames(path, frames, COLUMNS):
            system = _SYSTEM.fullmatch(next(systems_of, b"").decode().strip())
            if system is None:
                raise ValueError(f"{systems.name} has no line random<sid>,frame<fid>,<energy> for it")
            pos_N3, cell_33 = frame.columns["pos"], frame.cell_33
            edges = neighbours(pos_N3, cell_33)
            yield Structure(
                pos=pos_N3,
                atomic_numbers=frame.columns["species"],
                cell=cell_33,
                edge_index=edges.index_2E,
                cell_offsets=edges.offset_E3,
                force=frame.columns["forces"],
                y=np.array(float(frame.properties["energy"]) - float(system[3])),
                fixed=~frame.columns["move_mask"],
                tags=frame.columns["tags"],
                sid=np.array(int(system[1])),
                fid=np.array(int(system[2])),
            )
        if next(systems_of, None) is not None:
            raise ValueError(f"{systems.name} has more lines than {path.name} structures: it is truncated")


def _opened(path: Path) -> BinaryIO:
    file = open_regular(path)
    return lzma.open(file) if path.suffix == PACKED else file  # type: ignore[return-value]


def _in_lmdb(path: Path) -> Iterator[Structure]:
    with closing(LmdbFile(path)) as file:
        for index in range(file.length):
            graph = load_graph(file.read(index), f"{path}: sample {index}")
            missing = [name for name in GRAPH_FIELDS if name not in graph]
            if missing:
                raise ValueError(f"the graph has no {missing[0]}")
            fields = {name: np.asarray(graph[name]) for name in GRAPH_FIELDS}
            fields |= {name: fields[name].reshape(()) for name in ("y", "sid", "fid")}
            fields["cell"] = fields["cell"].reshape(3, 3)
            atoms = fields["atomic_numbers"].size
            if fields["pos"].shape != (atoms, 3):
                raise ValueError(f"pos has the shape {fields['pos'].shape}, not {(atoms, 3)}")
            if not np.isin(fields["atomic_numbers"], np.arange(1, len(SYMBOLS) + 1)).all():
                raise ValueError(f"an atomic number is not in 1 to {len(SYMBOLS)}")
            if "edge_index" in graph:
                edges = _checked_edges(graph, fields["pos"], fields["cell"])
            else:
                edges = neighbours(fields["pos"].astype(np.float64), fields["cell"].astype(np.float64))
            yield Structure(edge_index=edges.index_2E, cell_offsets=edges.offset_E3, **fields)


def _checked_edges(graph: dict[str, Any], pos_N3: NDArray[Any], cell_33: NDArray[Any]) -> Edges:
    """Return the edges of a graph without those of length 0, in our order."""
    index_2E, offset_E3 = np.asarray(graph["edge_index"]), np.asarray(graph.get("cell_offsets"))
    edges = index_2E.size // 2
    if index_2E.shape != (2, edges) or offset_E3.shape != (edges, 3) or not (index_2E.dtype == offset_E3.dtype == int):
        raise ValueError("edge_index and cell_offsets are not int64 of shape (2, E) and (E, 3)")
    if edges and (index_2E.min() < 0 or index_2E.max() >= len(pos_N3)):
        raise ValueError(f"an edge has an atom outside of 0 to {len(pos_N3) - 1}")
    source, target = index_2E
    kept = np.linalg.norm(pos_N3[source] - pos_N3[target] + offset_E3 @ cell_33, axis=1) >= SHORTEST
    if not kept.any():
        raise ValueError("it has no neighbours: no edge is longer than 0")
    if (most := np.bincount(target[kept]).max()) > NEIGHBOURS:
        raise ValueError(f"an atom has {most} neighbours, and at most {NEIGHBOURS} are expected")
    return ordered(index_2E[:, kept], offset_E3[kept])


@dataclass(frozen=True)
class RawData:
    """All files by split, sorted by name; ``synthetic`` is the description of synthetic data, None for real data."""

    splits: dict[str, list[Path]]
    synthetic: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Return the SHA-256 over names and sizes of all files."""
        return fingerprint_of(
            (split, path.name, path.stat().st_size) for split, paths in self.splits.items() for path in paths
        )


def open_raw(raw_dir: Path) -> RawData:
    """Find the files of both splits in ``raw_dir`` or folders below it.

    Raises:
        DataError: the folder or a split is missing.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; fetch the trajectories or generate synthetic data")
    splits = {}
    for split, folders in FOLDERS.items():
        first = find_file(raw_dir, *(f"{folder}/*{suffix}" for folder in folders for suffix in SUFFIXES))
        if first is None:
            hint = packed_hint(raw_dir, f"{folders[-1]}.tar")
            raise DataError(f"{raw_dir} has neither {folders[0]} nor {folders[1]} with *.extxyz or *.lmdb{hint}")
        splits[split] = next(found for suffix in SUFFIXES if (found := listed(first.parent, f"*{suffix}")))
    return RawData(splits, description_of(raw_dir, *(files[0] for files in splits.values())))
