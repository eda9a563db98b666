"""Folder of prepared data: structures, alignments, and the chains of both sets.

``pdb_mmcif/processed`` has

- ``chains.csv``: a row for each protein chain, with the columns of :data:`COLUMNS`;
- ``dicts/<2 characters>``: a pickled dict of structures (:mod:`benchmarks.openfold.structures`) by identifier, for
  those with these characters in the middle;
- ``obsolete.dat``: superseded entries of the Protein Data Bank.

``open_protein_set/processed/pdb_alignments`` has ``<k>.db``, alignments one after the other, and ``super.index``, JSON
with a database and a list of [name, start, size] for each chain. Identical chains share files.

``train.npy`` and ``eval.npy`` have all that a run needs of the chains of both sets, and ``structures.npy`` of the
chains of all structures, because these tables are read in a moment: int64, with the columns :data:`SET_COLUMNS` and
:data:`STRUCTURE_COLUMNS`. Names are numbers (:func:`encode_name`), days are ordinals of :class:`datetime.date`.

Axes: S chains of a set.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.openfold.structures import Structure, unpack_atoms
from common.data import manifest
from common.data.manifest import Manifest
from common.errors import DataError
from common.formats import npy
from common.untrusted.pickled_arrays import load_values
from common.untrusted.regular_file import open_regular, read_bytes, read_text

FORMAT = "openfold-chains/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=openfold --raw-dir RAW --data-dir DATA"
REMEDY = "prepare the data again"
STRUCTURES, ALIGNMENTS = "pdb_mmcif/processed", "open_protein_set/processed/pdb_alignments"
CHAINS, OBSOLETE, DICTS = f"{STRUCTURES}/chains.csv", f"{STRUCTURES}/obsolete.dat", f"{STRUCTURES}/dicts"
INDEX = f"{ALIGNMENTS}/super.index"
SPLITS = {"train": "train.npy", "eval": "eval.npy"}
DAYS = "structures.npy"
COLUMNS = (
    "pdb_chain_id", "pdb_id", "author_chain_id", "mmcif_chain_ids", "release_date", "resolution", "pdb_cluster_id",
    "sequence_length", "sequence",
)  # fmt: skip
"""Columns of ``chains.csv``. ``mmcif_chain_ids`` are separated by ``;``; a missing resolution is empty."""
MSAS = ("uniref90_hits.a3m", "bfd_uniclust_hits.a3m", "mgnify_hits.a3m")
"""Alignments of a chain, in the order in which they are joined."""
HITS = "pdb70_hits.hhr"
FILES = (*MSAS, HITS)
SET_COLUMNS = ("structure", "chain", "day", "residues", "cluster", "database", *("start", "size") * len(FILES))
"""Columns of a set: names of structure and chain, release date, length, cluster, and the files in a database."""
STRUCTURE_COLUMNS = ("structure", "chain", "day")
SHARDS = 10
"""Number of databases."""
KALIGN = "kalign"
"""Name of the program Kalign, and key in ``source`` of the manifest: whether templates are realigned."""
REALIGNED, NOT_REALIGNED = "templates are realigned", "was not found: templates of other sequences are left out"
NO_CLUSTER = -1
_DICT_BYTES, _TABLE_BYTES = 2**31, 2**31
_NAME_BYTES = 7


class Chain(NamedTuple):
    """A row of ``chains.csv``.

    Attributes:
        resolution: in angstrom; None if it is missing.
        pdb_cluster_id: cluster of chains with 40 % of equal residues; :data:`NO_CLUSTER` without one.
    """

    pdb_chain_id: str
    pdb_id: str
    author_chain_id: str
    mmcif_chain_ids: str
    release_date: str
    resolution: float | None
    pdb_cluster_id: int
    sequence: str


def write_chains(file: io.TextIOBase, chains: Iterable[Chain]) -> None:
    """Write ``chains.csv``."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for chain in chains:
        resolution = "" if chain.resolution is None else f"{chain.resolution:g}"
        writer.writerow([*chain[:5], resolution, chain.pdb_cluster_id, len(chain.sequence), chain.sequence])


def shard_of(pdb_chain_id: str) -> int:
    """Return the number of the database with the alignments of a chain."""
    return int.from_bytes(hashlib.sha256(pdb_chain_id.encode()).digest()[:8], "little") % SHARDS


def dict_name(pdb_id: str) -> str:
    """Return the name of the file in ``dicts`` with a structure."""
    return pdb_id[1:3]


def encode_name(name: str) -> int:
    """Return a name of up to 7 characters as a number.

    Raises:
        ValueError: the name is longer, or has other characters than ASCII.
    """
    encoded = name.encode("ascii")
    if len(encoded) > _NAME_BYTES:
        raise ValueError(f"the name {name!r} has more than {_NAME_BYTES} characters")
    return int.from_bytes(encoded, "little")


def decode_name(number: int) -> str:
    """Return the name of a number; the inverse of :func:`encode_name`.

    Raises:
        DataError: the number is no name, because its table is damaged.
    """
    try:
        return number.to_bytes(_NAME_BYTES + 1, "little").rstrip(b"\0").decode("ascii")
    except (OverflowError, UnicodeDecodeError) as error:
        raise DataError(f"{number} in a table of chains is not the number of a name; {REMEDY}") from error


def read_alignments(root: Path, database: int, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the content of the files at (start, size) of a database.

    Raises:
        DataError: the database is truncated.
    """
    path = root / ALIGNMENTS / f"{database}.db"
    contents = []
    with open_regular(path) as file:
        total = path.stat().st_size
        for start, size in spans:
            if not 0 <= start <= start + size <= total:
                raise DataError(f"{path} has {total:,} bytes, and {INDEX} has a file up to {start + size:,}; {REMEDY}")
            file.seek(start)
            contents.append(file.read(size))
    return contents


class Structures:
    """Reads structures of a prepared folder, and keeps the files that were read last.

    Args:
        kept: number of files in memory.
    """

    def __init__(self, root: Path, kept: int = 4) -> None:
        self._root = root
        self._read = functools.lru_cache(kept)(self._load)

    def find(self, pdb_id: str) -> Structure:
        """Return a structure.

        Raises:
            DataError: it is missing, or a file is missing or damaged.
        """
        entry = self._read(dict_name(pdb_id)).get(pdb_id)
        if entry is None:
            raise DataError(f"{self._root / DICTS / dict_name(pdb_id)} has no structure {pdb_id}; {REMEDY}")
        sequences = entry.get("sequences") if isinstance(entry, dict) else None
        if not isinstance(sequences, dict) or not all(isinstance(sequence, str) for sequence in sequences.values()):
            raise DataError(f"{self._root / DICTS}: structure {pdb_id} has no sequences; {REMEDY}")
        return entry

    def chain(self, pdb_id: str, author: str) -> tuple[str, NDArray[np.float32], NDArray[np.bool_], float | None]:
        """Return sequence, positions (L, 37, 3) and mask (L, 37) of a chain, and the resolution in angstrom.

        Raises:
            DataError: there is no such chain, or it is damaged.
        """
        if author not in (entry := self.find(pdb_id))["sequences"]:
            raise DataError(f"{self._root / DICTS} has no chain {pdb_id}_{author}; {REMEDY}")
        try:
            return entry["sequences"][author], *unpack_atoms(entry, author), entry["resolution"]
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise DataError(f"{self._root / DICTS}: structure {pdb_id}: {error}; {REMEDY}") from error

    def _load(self, name: str) -> dict[str, Any]:
        path = self._root / DICTS / name
        return load_values(read_bytes(path, _DICT_BYTES, remedy=REMEDY), str(path))


def read_obsolete(path: Path) -> dict[str, str]:
    """Return the successor of each superseded identifier, in lower case.

    Raises:
        DataError: the file is missing.
    """
    successors = {}
    for line in read_text(path).splitlines():
        words = line.split()
        if len(words) > 3 and words[0] == "OBSLTE":
            successors[words[2].lower()] = words[3].lower()
    return successors


def read_table(path: Path, columns: int) -> NDArray[np.int64]:
    """Return the table in ``path``, whose shape is (rows, ``columns``).

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        table = npy.viewed(memoryview(read_bytes(path, _TABLE_BYTES, remedy=REMEDY)))
    except ValueError as error:
        raise DataError(f"{path}: {error}; {REMEDY}") from error
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != columns or (table < -1).any():
        raise DataError(f"{path}: is no table of numbers with {columns} columns; {REMEDY}")
    return table


def read_manifest(root: Path) -> Manifest:
    """Return the manifest of ``root``.

    Raises:
        DataError: it is missing, malformed or of another format.
    """
    return manifest.read(root, FORMAT, PREPARE_COMMAND, ("train_samples", "eval_samples"))
