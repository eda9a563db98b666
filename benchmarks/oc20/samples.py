"""Folder of prepared samples: structures with their edges, in LMDB files.

``train`` and ``val_id`` have ``data.0000.lmdb`` and so on, with the keys of :mod:`common.formats.lmdb_file`. A value is
a record of :mod:`common.formats.packed_arrays`: a :class:`Structure`. Beside each
file, ``data.0000.npy`` has the counts of its samples, int32 (S, 4), as in :data:`COUNTS`. The samples of a split are
numbered through all files, sorted by name.

Axes: S samples; N atoms; E edges; T triplets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from benchmarks.oc20.graph import Edges, count_triplets, reverse_edges
from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError
from common.formats import npy
from common.formats.lmdb_file import LmdbFile
from common.formats.packed_arrays import Fields, pack, unpack
from common.formats.raw_files import listed

FORMAT = "oc20-lmdb/2"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=oc20 --raw-dir RAW --data-dir DATA"
SPLITS = {"train": "train", "eval": "val_id"}
"""Prefix of the manifest's count to the folder."""
PATTERN = "data.*.lmdb"
COUNTS = ("atoms", "edges", "triplets", "free")
"""Columns of the counts of a sample; ``free`` is the number of atoms that are not fixed."""
ATOMS, EDGES, TRIPLETS, FREE = range(len(COUNTS))
REMEDY = "prepare the data again"
Array = NDArray[Any]


@dataclass(frozen=True)
class Structure:
    """A structure with its forces; the names are those of OpenCatalyst's graphs.

    The annotations say type and shape in a value. The types are the smallest ones for the values.

    Attributes:
        y: energy in eV, relative to the reference energy.
        sid, fid: numbers of the system and of the frame in its trajectory.
        cell: the rows are the vectors of the cell in angstrom.
        pos, force: in angstrom, and in eV per angstrom.
        edge_index, cell_offsets: see :class:`benchmarks.oc20.graph.Edges`.
        edge_reverse: see :func:`benchmarks.oc20.graph.reverse_edges`.
        fixed: 1 for a fixed atom, else 0.
        tags: 0 for an atom below the surface, 1 at the surface, 2 in the adsorbate.
    """

    y: Annotated[Array, "<f8", ()]
    sid: Annotated[Array, "<i8", ()]
    fid: Annotated[Array, "<i8", ()]
    cell: Annotated[Array, "<f4", (3, 3)]
    pos: Annotated[Array, "<f4", ("N", 3)]
    force: Annotated[Array, "<f4", ("N", 3)]
    edge_index: Annotated[Array, "<u2", (2, "E")]
    cell_offsets: Annotated[Array, "i1", ("E", 3)]
    edge_reverse: Annotated[Array, "<u2", ("E",)]
    atomic_numbers: Annotated[Array, "u1", ("N",)]
    fixed: Annotated[Array, "u1", ("N",)]
    tags: Annotated[Array, "u1", ("N",)]

    @classmethod
    def of(cls, edges: Edges, **fields: NDArray[Any]) -> Structure:
        """Return a structure with these edges; ``fields`` are all attributes that are not about edges."""
        reverse_E = reverse_edges(edges)
        return cls(edge_index=edges.index_2E, cell_offsets=edges.offset_E3, edge_reverse=reverse_E, **fields)

    def counts(self) -> list[int]:
        """Return the sample's counts, see :data:`COUNTS`."""
        atoms, triplets = len(self.pos), count_triplets(Edges(self.edge_index, self.cell_offsets), self.edge_reverse)
        return [atoms, self.edge_index.shape[1], triplets, atoms - int(self.fixed.sum())]

    def encode(self) -> bytes:
        """Return the value in an LMDB file; raises like :func:`common.formats.packed_arrays.pack`."""
        return pack(vars(self), FIELDS)


FIELDS: Fields = {name: hint.__metadata__ for name, hint in get_type_hints(Structure, include_extras=True).items()}
"""Type and shape of each array in a value."""


class Split:
    """The samples of one split; several threads may read.

    Attributes:
        counts_S4: (S, 4) int32, see :data:`COUNTS`.

    Raises:
        DataError: a file is missing or damaged, or has another number of samples than its counts.
    """

    def __init__(self, root: Path, folder: str) -> None:
        self._files: list[LmdbFile] = []
        self._paths = listed(root / folder, PATTERN)
        counts = []
        for path in self._paths:
            try:
                self._files.append(LmdbFile(path))
                counts.append(npy.mapped(path.with_suffix(".npy")))
                if counts[-1].shape != (self._files[-1].length, len(COUNTS)) or counts[-1].dtype != np.int32:
                    raise ValueError(f"its counts are {counts[-1].dtype} of shape {counts[-1].shape}")
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: {error}; {REMEDY}") from error
        if not counts:
            raise DataError(f"{root / folder} has no {PATTERN}; run '{PREPARE_COMMAND}'")
        self.counts_S4 = np.concatenate(counts)
        self._ends = np.cumsum([file.length for file in self._files])

    def read(self, sample: int) -> Structure:
        """Return a sample.

        Raises:
            DataError: it is missing or damaged, or has other counts than those beside the file.
        """
        number = int(np.searchsorted(self._ends, sample, side="right"))
        file, name = self._files[number], f"{self._paths[number]}: sample {sample}"
        try:
            structure = Structure(**unpack(file.read(sample - int(self._ends[number]) + file.length), FIELDS))
        except ValueError as error:
            raise DataError(f"{name}: {error}; {REMEDY}") from error
        expected = self.counts_S4[sample, : EDGES + 1].tolist()
        if (found := [len(structure.pos), structure.edge_index.shape[1]]) != expected:
            raise DataError(f"{name} has {found[0]} atoms and {found[1]} edges, its counts say {expected}; {REMEDY}")
        if structure.edge_index.max() >= len(structure.pos):
            raise DataError(f"{name} has an edge with an atom outside of 0 to {len(structure.pos) - 1}; {REMEDY}")
        if structure.edge_reverse.max() >= expected[EDGES]:
            raise DataError(f"{name} has a reverse edge outside of 0 to {expected[EDGES] - 1}; {REMEDY}")
        return structure

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def read_manifest(root: Path) -> Manifest:
    """Return the manifest of ``root``.

    Raises:
        DataError: the manifest is missing, malformed or of another format.
    """
    counts = (f"train_{name}" for name in COUNTS)
    return manifest.read(root, FORMAT, PREPARE_COMMAND, ("train_samples", "eval_samples", *counts))


def mean_counts(found: Manifest) -> dict[str, float]:
    """Return the mean numbers of atoms, edges and triplets of a training structure, by name."""
    return {name: found.counts[f"train_{name}"] / found.counts["train_samples"] for name in COUNTS[:FREE]}
