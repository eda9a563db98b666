"""Structures against an mmCIF file with the peculiarities of the Protein Data Bank."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest

from benchmarks.openfold import structures
from benchmarks.openfold.residues import ATOM_TYPES
from benchmarks.openfold.samples import DICTS, Structures
from benchmarks.openfold.structures import read_structure, unpack_atoms
from common.errors import DataError

HEAD = """data_1ABC
_entry.id 1ABC
_exptl.method 'SOLUTION NMR'
loop_
_pdbx_audit_revision_history.ordinal
_pdbx_audit_revision_history.revision_date
1 2011-07-13
2 2009-01-02
loop_
_entity_poly.entity_id
_entity_poly.type
_entity_poly.pdbx_seq_one_letter_code_can
1 polypeptide(L)
;MR
ASX
;
2 polydeoxyribonucleotide AC
3 'polypeptide(D)' ?
loop_
_entity_poly_seq.entity_id
_entity_poly_seq.num
_entity_poly_seq.mon_id
1 1 MSE
1 2 ARG
1 3 ALA
1 3 GLY
1 4 SEP
1 5 XYZ
2 1 DA
2 2 DC
3 1 GLY
3 2 CRO
loop_
_struct_asym.id
_struct_asym.entity_id
A 1
B 1
C 2
D 3
E 4
"""
COLUMNS = """loop_
_atom_site.group_PDB
_atom_site.label_atom_id
_atom_site.label_alt_id
_atom_site.label_comp_id
_atom_site.label_asym_id
_atom_site.label_seq_id
_atom_site.Cartn_x
_atom_site.Cartn_y
_atom_site.Cartn_z
_atom_site.occupancy
_atom_site.auth_asym_id
_atom_site.auth_seq_id
_atom_site.pdbx_PDB_model_num
"""
ATOMS = """HETATM SE . MSE A 1 1.0 2.0 3.0 1.00 X 101 1
HETATM CA . MSE A 1 1.5 2.0 3.0 1.00 X 101 1
ATOM CD . ARG A 2 0.0 0.0 0.0 1.00 X 102A 1
ATOM NH1 . ARG A 2 4.0 0.0 0.0 1.00 X 102A 1
ATOM NH2 . ARG A 2 3.0 0.0 0.0 1.00 X 102A 1
ATOM CA A ALA A 3 7.0 0.0 0.0 0.40 X 103 1
ATOM CA B ALA A 3 8.0 0.0 0.0 0.60 X 103 1
ATOM CA C GLY A 3 9.0 0.0 0.0 0.90 X 103 1
ATOM HA . ALA A 3 9.0 9.0 0.0 1.00 X 103 1
ATOM "O5'" . DA C 1 1.0 1.0 1.0 1.00 Z 1 1
HETATM O . HOH E . 5.0 5.0 5.0 1.00 X 301 1
ATOM N . GLY B 3 -1.0 -2.0 -3.0 . Y 3 1
ATOM CA . GLY D 1 1.0 1.0 1.0 1.00 W 1 1
HETATM CA . MSE A 1 99.0 2.0 3.0 1.00 X 101 2
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "1abc.cif").write_text(HEAD + COLUMNS + ATOMS)
    return tmp_path / "1abc.cif"


def test_properties_of_a_structure(path: Path) -> None:
    found = read_structure(path)
    assert {name: value for name, value in found.items() if name != "atoms"} == {
        "pdb_id": "1abc",
        "exptl_method": "SOLUTION NMR",
        "release_date": "2009-01-02",
        "resolution": None,
        "author_chain_ids": ["X", "Y", "W"],
        "entity_id_to_mmcif_chain_ids": {"1": ["A", "B"], "3": ["D"]},
        "mmcif_chain_id_to_author_chain_id": {"A": "X", "B": "Y", "D": "W"},
        "sequences": {"X": "MRASX", "Y": "MRASX", "W": "GX"},
    }
    assert pickle.loads(pickle.dumps(found)) == found


def atoms(path: Path, chain: str) -> dict[tuple[int, str], list[float]]:
    position_L373, mask_L37 = unpack_atoms(read_structure(path), chain)
    assert position_L373.dtype == np.float32
    assert not position_L373[~mask_L37].any()
    return {
        (int(residue), ATOM_TYPES[atom]): position_L373[residue, atom].tolist()
        for residue, atom in np.argwhere(mask_L37)
    }


def test_atoms_of_a_chain(path: Path) -> None:
    """Selenium is sulfur; NH1 is the nearer one; the highest occupancy and the first residue and model count."""
    assert atoms(path, "X") == {
        (0, "CA"): [1.5, 2, 3],
        (0, "SD"): [1, 2, 3],
        (1, "CD"): [0, 0, 0],
        (1, "NH1"): [3, 0, 0],
        (1, "NH2"): [4, 0, 0],
        (2, "CA"): [8, 0, 0],
    }
    assert atoms(path, "Y") == {(2, "N"): [-1, -2, -3]}


@pytest.mark.parametrize(
    ("line", "resolution"),
    [
        ("_refine.ls_d_res_high 1.85", 1.85),
        ("_em_3d_reconstruction.resolution 3.2", 3.2),
        ("_refine.ls_d_res_high ?\n_em_3d_reconstruction.resolution 4", None),
        ("_refine.ls_d_res_high low", None),
        ("_refine.entry_id 1ABC\n_em_3d_reconstruction.resolution 4\n_reflns.d_resolution_high 2", 4.0),
        ("loop_\n_refine.method\n_refine.ls_d_res_high\nX 1.8\nN 2.4\nM ?\n", 2.4),
        ("_reflns.d_resolution_high 2.5", 2.5),
    ],
)
def test_the_resolution_is_that_of_the_first_column(line: str, resolution: float | None, path: Path) -> None:
    path.write_text(HEAD.replace("_exptl.method", f"{line}\n_exptl.method") + COLUMNS + ATOMS)
    assert read_structure(path)["resolution"] == resolution


def test_packed_files_are_read(path: Path) -> None:
    packed = path.with_suffix(".cif.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_structure(packed) == read_structure(path)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"1abc\.cif\.gz is damaged: .*fetch it again"):
        read_structure(packed)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("ARG A 2 0.0", "ARG A 6 0.0", "an atom of residue 6 of chain A, which has 5"),
        ("ARG A 2 0.0", "ARG A 2 far", "could not convert string to float"),
        ("ARG A 2 0.0", "ARG A 2 nan", "a position in chain A is not finite"),
        ("_atom_site.occupancy", "_atom_site.other", "KeyError: 'occupancy'"),
        ("2 2009-01-02", "2", "ends within a row"),
    ],
)
def test_a_damaged_structure_is_named(old: str, new: str, complaint: str, path: Path) -> None:
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"^{path}: .*{complaint}"):
        read_structure(path)


def test_atoms_that_do_not_fit_their_sequence_are_refused(path: Path) -> None:
    found = read_structure(path)
    found["sequences"]["X"] = "M" * 6
    with pytest.raises(ValueError, match=r"all_atom_positions of chain X does not have the shape \(6, 37, 3\)"):
        unpack_atoms(found, "X")


def test_atoms_of_too_long_chains_are_not_unpacked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_structure(path)
    monkeypatch.setattr(structures, "MOST_RESIDUES", 4)
    with pytest.raises(ValueError, match="chain X has 5 residues, more than 4"):
        unpack_atoms(found, "X")


@pytest.mark.parametrize("entry", [{"sequences": ["X"]}, {"sequences": {"X": ["M"]}}, ["sequences"], {}])
def test_an_entry_without_sequences_is_named(entry: object, tmp_path: Path) -> None:
    (tmp_path / DICTS).mkdir(parents=True)
    (tmp_path / DICTS / "ab").write_bytes(pickle.dumps({"1abc": entry}))
    with pytest.raises(DataError, match=r"dicts: structure 1abc has no sequences; prepare the data again"):
        Structures(tmp_path).chain("1abc", "X")
