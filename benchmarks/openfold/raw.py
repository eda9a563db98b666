"""Raw data of OpenFold: the Protein Data Bank, OpenProteinSet, and the list of the targets of the evaluation.

Below the raw folder, or a folder in it, are

- ``pdb_mmcif``: ``mmcif`` with ``*.cif`` or ``*.cif.gz``, in subfolders or not; ``obsolete.dat``; and
  ``clusters-by-entity-40.txt``, a cluster per line;
- ``open_protein_set``: ``pdb/<chain>`` with alignments, in subfolders ``a3m`` and ``hhr`` or not; and
  ``duplicate_pdb_chains.txt``, identical chains per line;
- ``cameo_chains.csv``: a row ``target,submission_date`` for each target of the evaluation, such as
  ``7abc_A,2021-09-18``. The chain of a target is usually an mmcif chain, and sometimes one of the authors.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.openfold.samples import FILES
from common.data.raw_layout import find_file
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats.alignments import stockholm_to_a3m
from common.formats.raw_files import is_data, listed
from common.untrusted.regular_file import read_bytes, read_text

MMCIF, OBSOLETE, CLUSTERS = "pdb_mmcif/mmcif", "pdb_mmcif/obsolete.dat", "pdb_mmcif/clusters-by-entity-40.txt"
MSAS, DUPLICATES = "open_protein_set/pdb", "open_protein_set/duplicate_pdb_chains.txt"
CAMEO = "cameo_chains.csv"
CAMEO_COLUMNS = ["target", "submission_date"]
MOST_BYTES = 2**34
"""Largest size of an alignment."""
_IDENTIFIER = re.compile(r"[0-9][a-z0-9]{3}")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_FOLDERS = ("a3m", "hhr", "")


@dataclass(frozen=True)
class RawData:
    """All raw files.

    Attributes:
        structures: files of each structure by its identifier, sorted.
        chains: names of the folders with alignments, sorted.
        synthetic: description of synthetic data, None for real data.
    """

    root: Path
    structures: dict[str, Path]
    chains: list[str]
    synthetic: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Return the SHA-256 over names and sizes of the structures, the names of the chains, and all lists."""
        digest = hashlib.sha256()
        for name, path in self.structures.items():
            digest.update(f"{name}\t{path.stat().st_size}\n".encode())
        digest.update("\n".join(self.chains).encode())
        for name in (OBSOLETE, CLUSTERS, DUPLICATES, CAMEO):
            digest.update(read_bytes(self.root / name))
        return digest.hexdigest()

    def alignments(self, chain: str) -> dict[str, bytes]:
        """Return the files of a chain by name; Stockholm files are converted to A3M.

        Raises:
            DataError: a file is damaged.
        """
        found = {}
        for name in FILES:
            for folder in _FOLDERS:
                path = self.root / MSAS / chain / folder / name
                if path.is_file():
                    found[name] = read_bytes(path, MOST_BYTES)
                    break
                if path.with_suffix(".sto").is_file():
                    try:
                        found[name] = stockholm_to_a3m(read_text(path.with_suffix(".sto"), MOST_BYTES)).encode()
                    except ValueError as error:
                        raise DataError(f"{path.with_suffix('.sto')}: {error}; fetch it again") from error
                    break
        of_chain = self.root / MSAS / chain
        if not found and (others := listed(of_chain)):
            raise DataError(
                f"{of_chain} has {others[0].name}, but no {FILES[0]} or other alignment; unpack its files, or fetch "
                "them again"
            )
        return found

    def identical(self) -> list[list[str]]:
        """Return the groups of identical chains."""
        return [line.split() for line in read_text(self.root / DUPLICATES).splitlines() if line.strip()]

    def clusters(self) -> dict[str, int]:
        """Return the number of the cluster of each entity, whose name is ``<PDB ID in upper case>_<entity>``."""
        lines = read_text(self.root / CLUSTERS).splitlines()
        return {name: number for number, line in enumerate(lines) for name in line.split()}

    def evaluated(self) -> dict[str, str]:
        """Return the day of submission, ``YYYY-MM-DD``, of each target of the evaluation.

        Raises:
            DataError: the list is damaged, or a day has another form.
        """
        path = self.root / CAMEO
        rows = [row for row in csv.reader(io.StringIO(read_text(path))) if row]  # without empty lines
        if not rows or rows[0] != CAMEO_COLUMNS or any(len(row) != len(CAMEO_COLUMNS) for row in rows):
            raise DataError(f"{path}: its columns are not {','.join(CAMEO_COLUMNS)}")
        for target, day in rows[1:]:
            if not _DAY.fullmatch(day):
                raise DataError(f"{path}: the day {day!r} of {target} does not have the form YYYY-MM-DD")
        return dict(rows[1:])


def identifier_of(name: str) -> str:
    """Return the identifier of the structure in an mmCIF file with this name, in lower case."""
    return name.removesuffix(".gz").removesuffix(".cif").lower()


def open_raw(raw_dir: Path) -> RawData:
    """Find the raw data in ``raw_dir`` or a folder below it.

    Raises:
        DataError: a folder or a list is missing, or two files have the same structure.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; fetch the data or generate synthetic data")
    first = find_file(raw_dir, CAMEO, others=("pdb_mmcif", "open_protein_set"))
    root = raw_dir if first is None else first.parent
    for name in (CAMEO, MMCIF, OBSOLETE, CLUSTERS, MSAS, DUPLICATES):
        if not (root / name).exists():
            raise DataError(f"{root / name} is missing")
    structures: dict[str, Path] = {}
    for path in (path for suffix in (".cif", ".cif.gz") for path in listed(root / MMCIF, f"**/*{suffix}")):
        identifier = identifier_of(path.name)
        if _IDENTIFIER.fullmatch(identifier):
            if identifier in structures:
                both = sorted((structures[identifier], path))
                raise DataError(f"{both[0]} and {both[1]} have the same structure; remove one of them")
            structures[identifier] = path
    if not structures:
        raise DataError(f"{root / MMCIF} has no *.cif and no *.cif.gz")
    with os.scandir(root / MSAS) as entries:
        chains = sorted(entry.name for entry in entries if is_data(entry.name) and entry.is_dir())
    return RawData(root, dict(sorted(structures.items())), chains, description_of(raw_dir, root / CAMEO))
