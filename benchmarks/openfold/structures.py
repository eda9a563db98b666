"""Structures of the Protein Data Bank: the protein chains of an mmCIF file, with the 37 possible atoms of each residue.

A structure is a dict of plain values, which ``prepare`` stores as a pickle:

- ``pdb_id``, ``exptl_method``, ``release_date`` (the first one, ``YYYY-MM-DD``), ``resolution`` in angstrom or None;
- ``author_chain_ids`` of the protein chains; ``entity_id_to_mmcif_chain_ids``; ``mmcif_chain_id_to_author_chain_id``;
- ``sequences``: one-letter codes by author chain;
- ``atoms``: by author chain, ``all_atom_positions`` (L, 37, 3) float32 in angstrom and ``all_atom_mask`` (L, 37) bool,
  both packed with zlib.

A protein chain has two names. The authors' name ("author chain") is part of the chain's identifier, and several
molecules can share it. The data bank's name ("mmcif chain") is different for each molecule.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.openfold.residues import ATOM_TYPES, ONE, RESTYPES
from common.formats.mmcif import Category, read_categories
from common.untrusted.archives import read_gzip
from common.untrusted.regular_file import read_bytes

Structure = dict[str, Any]
MOST_BYTES = 2**31
"""Largest size of an mmCIF file."""
MOST_RESIDUES = 100_000
"""Largest length of a chain; the longest protein has 35,213 residues."""
_CATEGORIES = (
    "entry", "exptl", "pdbx_audit_revision_history", "refine", "em_3d_reconstruction", "reflns", "entity_poly",
    "entity_poly_seq", "struct_asym", "atom_site",
)  # fmt: skip
_RESOLUTIONS = (("refine", "ls_d_res_high"), ("em_3d_reconstruction", "resolution"), ("reflns", "d_resolution_high"))
_ATOMS = {name: index for index, name in enumerate(ATOM_TYPES)}
_CD, _NH1, _NH2 = (_ATOMS[name] for name in ("CD", "NH1", "NH2"))


def read_structure(path: Path) -> Structure:
    """Return the protein chains of an mmCIF file, which may be packed with gzip.

    Raises:
        DataError: the file cannot be read, or its packing is damaged.
        ValueError: the content is no structure: malformed, incomplete, or without a release date.
    """
    packed = path.suffix == ".gz"
    content = read_gzip(path, MOST_BYTES) if packed else read_bytes(path, MOST_BYTES, remedy="fetch it again")
    try:
        return structure_of(read_categories(content.decode("utf-8"), _CATEGORIES))
    except (ValueError, LookupError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def structure_of(categories: dict[str, Category]) -> Structure:
    """Return the structure of the categories of an mmCIF file.

    Raises:
        KeyError: a category or a column is missing.
        ValueError: a value is malformed.
    """
    sequences = _sequences(categories)
    asym = categories["struct_asym"]
    molecules: dict[str, list[str]] = {}
    for chain, entity in zip(asym["id"], asym["entity_id"], strict=True):
        if entity in sequences:
            molecules.setdefault(entity, []).append(chain)
    entity_of = {chain: entity for entity, chains in molecules.items() for chain in chains}
    authors, atoms = _atoms(categories, {chain: len(sequences[entity]) for chain, entity in entity_of.items()})
    first: dict[str, str] = {}
    for chain, author in authors.items():
        first.setdefault(author, chain)
    dates = [date for date in categories["pdbx_audit_revision_history"]["revision_date"] if date]
    return {
        "pdb_id": categories["entry"]["id"][0].lower(),
        "exptl_method": ", ".join(categories.get("exptl", {}).get("method", [])),
        "release_date": datetime.date.fromisoformat(min(dates)).isoformat(),
        "resolution": _resolution(categories),
        "author_chain_ids": list(first),
        "entity_id_to_mmcif_chain_ids": molecules,
        "mmcif_chain_id_to_author_chain_id": authors,
        "sequences": {author: sequences[entity_of[chain]] for author, chain in first.items()},
        "atoms": {author: pack_atoms(*atoms[chain]) for author, chain in first.items()},
    }


def pack_atoms(position_L373: NDArray[np.float32], mask_L37: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the entry of a chain in ``atoms``."""
    arrays = {"all_atom_positions": position_L373.astype("<f4"), "all_atom_mask": mask_L37.astype("?")}
    return {name: (zlib.compress(array.tobytes(), 6), array.shape) for name, array in arrays.items()}


def unpack_atoms(entry: Structure, author: str) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return positions (L, 37, 3) and mask (L, 37) of a chain.

    Raises:
        ValueError: the entry is damaged, does not fit the chain's sequence, or is longer than :data:`MOST_RESIDUES`.
        TypeError, zlib.error: the entry is damaged.
        KeyError: the structure has no such chain.
    """
    length = len(entry["sequences"][author])
    if length > MOST_RESIDUES:
        raise ValueError(f"chain {author} has {length:,} residues, more than {MOST_RESIDUES:,}")
    found = []
    for name, kind, shape in (
        ("all_atom_positions", "<f4", (length, 37, 3)), ("all_atom_mask", "?", (length, 37)),
    ):  # fmt: skip
        content, stored = entry["atoms"][author][name]
        most = np.dtype(kind).itemsize * int(np.prod(shape))
        inflated = zlib.decompressobj().decompress(content, most + 1)
        if tuple(stored) != shape or len(inflated) != most:
            raise ValueError(f"{name} of chain {author} does not have the shape {shape}")
        found.append(np.frombuffer(inflated, kind).reshape(shape))
    return found[0], found[1]


def _sequences(categories: dict[str, Category]) -> dict[str, str]:
    """Return the one-letter codes of each entity that is a peptide.

    The data bank's own one-letter codes name the parents of modified residues. If a code stands for several residues,
    such as a chromophore, or several for one, modified residues are X.
    """
    if "entity_poly" not in categories:
        return {}
    listed = categories["entity_poly_seq"]
    monomers: dict[str, dict[int, str]] = {}
    for entity, number, name in zip(listed["entity_id"], listed["num"], listed["mon_id"], strict=True):
        monomers.setdefault(entity, {}).setdefault(int(number), name)  # of several residues in one place, the first
    found = {}
    described = categories["entity_poly"]
    codes = described.get("pdbx_seq_one_letter_code_can", [""] * len(described["entity_id"]))
    for entity, kind, text in zip(described["entity_id"], described["type"], codes, strict=True):
        names = [name for _, name in sorted(monomers.get(entity, {}).items())]
        if not kind.lower().startswith("polypeptide") or not 0 < len(names) <= MOST_RESIDUES:
            continue
        parents = "".join(text.split()).upper()
        if len(parents) != len(names):
            parents = "X" * len(names)
        letters = (ONE.get(name, parent) for name, parent in zip(names, parents, strict=True))
        found[entity] = "".join(letter if letter in RESTYPES else "X" for letter in letters)
    return found


def _resolution(categories: dict[str, Category]) -> float | None:
    """Return the largest number of the first of the columns that is present; None if it has no number."""
    texts = next((categories[name][column] for name, column in _RESOLUTIONS if column in categories.get(name, {})), [])
    numbers = []
    for text in texts:
        with contextlib.suppress(ValueError):
            numbers.append(float(text))
    return max((number for number in numbers if math.isfinite(number)), default=None)


def _atoms(
    categories: dict[str, Category], lengths: dict[str, int]
) -> tuple[dict[str, str], dict[str, tuple[NDArray[np.float32], NDArray[np.bool_]]]]:
    """Return the author chain, and positions and mask of the atoms, of each mmcif chain that has atoms.

    Of several models, the first one counts; of alternate locations of an atom, the one with the highest occupancy.
    """
    site = categories["atom_site"]
    models = site.get("pdbx_pdb_model_num", [])
    names = ("label_asym_id", "label_seq_id", "label_comp_id", "label_atom_id", "auth_asym_id")
    rows = zip(*(site[name] for name in names), *(site[f"cartn_{axis}"] for axis in "xyz"), site["occupancy"],
               models or [""] * len(site["occupancy"]), strict=True)  # fmt: skip
    authors: dict[str, str] = {}
    best: dict[str, dict[tuple[int, int], tuple[float, str, str, str]]] = {}
    kinds: dict[str, dict[int, str]] = {}
    for chain, sequence_id, residue, atom, author, x, y, z, occupancy, model in rows:
        if chain not in lengths or not sequence_id or (models and model != models[0]):
            continue
        number = int(sequence_id) - 1
        if not 0 <= number < lengths[chain]:
            raise ValueError(f"an atom of residue {sequence_id} of chain {chain}, which has {lengths[chain]}")
        authors.setdefault(chain, author)
        name = "SD" if residue == "MSE" and atom == "SE" else atom
        if kinds.setdefault(chain, {}).setdefault(number, residue) != residue or name not in _ATOMS:
            continue
        key, weight = (number, _ATOMS[name]), float(occupancy or 1)
        if (known := best.setdefault(chain, {}).get(key)) is None or known[0] < weight:
            best[chain][key] = weight, x, y, z
    atoms = {}
    for chain in authors:
        position_L373 = np.zeros((lengths[chain], len(ATOM_TYPES), 3), np.float32)
        mask_L37 = np.zeros((lengths[chain], len(ATOM_TYPES)), np.bool_)
        found = best.get(chain, {})
        if found:
            number, atom = np.array(list(found)).T
            position_L373[number, atom] = np.array([value[1:] for value in found.values()], np.float64)
            mask_L37[number, atom] = True
        if not np.isfinite(position_L373).all():
            raise ValueError(f"a position in chain {chain} is not finite")
        _order_arginines(position_L373, mask_L37, (n for n, name in kinds[chain].items() if name == "ARG"))
        atoms[chain] = position_L373, mask_L37
    return authors, atoms


def _order_arginines(position_L373: NDArray[np.float32], mask_L37: NDArray[np.bool_], arginines: Iterable[int]) -> None:
    """Exchange NH1 and NH2 where NH2 is nearer to CD: the nomenclature calls the nearer one NH1."""
    for residue in arginines:
        if mask_L37[residue, [_CD, _NH1, _NH2]].all():
            at = position_L373[residue]
            if np.linalg.norm(at[_NH1] - at[_CD]) > np.linalg.norm(at[_NH2] - at[_CD]):
                at[[_NH1, _NH2]] = at[[_NH2, _NH1]]
