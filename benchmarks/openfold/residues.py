"""Amino acids: names, atoms, torsions and ideal geometry of the residues that OpenFold predicts.

Each atom belongs to one of eight rigid groups: the backbone (0), the groups behind the torsions omega (1), phi (2) and
psi (3), which has the oxygen, and those behind chi 1 to 4 (4 to 7). Atoms have two numberings: *atom37* has one index
per name, *atom14* has the atoms of the residue's type one after another. (Source: supplement of AlphaFold 2, tables 2
and 3.)

Index 20 of all arrays is the unknown residue X, which has no atoms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RESTYPES = "ARNDCQEGHILKMFPSTWYV"
"""One-letter codes of the residues 0 to 19."""
UNKNOWN, GAP, MASK = 20, 21, 22
"""Further tokens of an alignment: residue X, gap, and the mask of the masked MSA."""
ATOM_TYPES = [
    "N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1", "ND2", "OD1", "OD2",
    "SD", "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2", "NH1", "NH2", "OH", "CZ", "CZ2", "CZ3",
    "NZ", "OXT",
]  # fmt: skip
"""Names of the atoms 0 to 36."""
N, CA, C, CB, O = range(5)  # noqa: E741
"""Indices of the backbone's atoms and of the first one of a side chain in :data:`ATOM_TYPES`."""
GROUPS, TORSIONS, CHIS = 8, 7, 4
_RING = {"CD1": "CD2", "CE1": "CE2"}
AMBIGUOUS = {"D": {"OD1": "OD2"}, "E": {"OE1": "OE2"}, "F": _RING, "Y": _RING}
"""Pairs of atoms whose names can be exchanged, because half a turn of the last torsion does not change the residue."""
_PERIODIC = {"D": 1, "E": 2, "F": 1, "Y": 1}
"""Index of the torsion whose half turn exchanges :data:`AMBIGUOUS` names."""
_SIDE_CHAINS = {
    "R": "CG CD NE CZ",
    "N": "CG OD1", "D": "CG OD1",
    "C": "SG",
    "Q": "CG CD OE1", "E": "CG CD OE1",
    "H": "CG ND1",
    "I": "CG1 CD1",
    "L": "CG CD1", "F": "CG CD1", "W": "CG CD1", "Y": "CG CD1",
    "K": "CG CD CE NZ",
    "M": "CG SD CE",
    "P": "CG CD",
    "S": "OG",
    "T": "OG1",
    "V": "CG1",
}  # fmt: skip
"""Fourth atoms of chi 1 to 4; chi i has the atoms i to i + 3 of N, CA, CB and these."""
_ATOMS = """
A ALA: N 0 -0.525 1.363 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.627 1.062 0; CB 0 -0.529 -0.774 -1.205
R ARG: N 0 -0.524 1.362 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.626 1.062 0; CB 0 -0.524 -0.778 -1.209; CG 4 0.616 1.39 0;
  CD 5 0.564 1.414 0; NE 6 0.539 1.357 0; CZ 7 0.758 1.093 0; NH1 7 0.206 2.301 0; NH2 7 2.078 0.978 0
N ASN: N 0 -0.536 1.357 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.625 1.062 0; CB 0 -0.531 -0.787 -1.2; CG 4 0.584 1.399 0;
  OD1 5 0.633 1.059 0; ND2 5 0.593 -1.188 0.001
D ASP: N 0 -0.525 1.362 0; CA 0 0 0 0; C 0 1.527 0 0; O 3 0.626 1.062 0; CB 0 -0.526 -0.778 -1.208;
  CG 4 0.593 1.398 0; OD1 5 0.61 1.091 0; OD2 5 0.592 -1.101 -0.003
C CYS: N 0 -0.522 1.362 0; CA 0 0 0 0; C 0 1.524 0 0; O 3 0.625 1.062 0; CB 0 -0.519 -0.773 -1.212; SG 4 0.728 1.653 0
Q GLN: N 0 -0.526 1.361 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.626 1.062 0; CB 0 -0.525 -0.779 -1.207;
  CG 4 0.615 1.393 0; CD 5 0.587 1.399 0; OE1 6 0.634 1.06 0; NE2 6 0.593 -1.189 -0.001
E GLU: N 0 -0.528 1.361 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.626 1.062 0; CB 0 -0.526 -0.781 -1.207;
  CG 4 0.615 1.392 0; CD 5 0.6 1.397 0; OE1 6 0.607 1.095 0; OE2 6 0.589 -1.104 -0.001
G GLY: N 0 -0.572 1.337 0; CA 0 0 0 0; C 0 1.517 0 0; O 3 0.626 1.062 0
H HIS: N 0 -0.527 1.36 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.625 1.063 0; CB 0 -0.525 -0.778 -1.208; CG 4 0.6 1.37 0;
  ND1 5 0.744 1.16 0; CD2 5 0.889 -1.021 0.003; CE1 5 2.03 0.851 0.002; NE2 5 2.145 -0.466 0.004
I ILE: N 0 -0.493 1.373 0; CA 0 0 0 0; C 0 1.527 0 0; O 3 0.627 1.062 0; CB 0 -0.536 -0.793 -1.213;
  CG1 4 0.534 1.437 0; CG2 4 0.54 -0.785 -1.199; CD1 5 0.619 1.391 0
L LEU: N 0 -0.52 1.363 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.625 1.063 0; CB 0 -0.522 -0.773 -1.214; CG 4 0.678 1.371 0;
  CD1 5 0.53 1.43 0; CD2 5 0.535 -0.774 1.2
K LYS: N 0 -0.526 1.362 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.626 1.062 0; CB 0 -0.524 -0.778 -1.208; CG 4 0.619 1.39 0;
  CD 5 0.559 1.417 0; CE 6 0.56 1.416 0; NZ 7 0.554 1.387 0
M MET: N 0 -0.521 1.364 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.625 1.062 0; CB 0 -0.523 -0.776 -1.21; CG 4 0.613 1.391 0;
  SD 5 0.703 1.695 0; CE 6 0.32 1.786 0
F PHE: N 0 -0.518 1.363 0; CA 0 0 0 0; C 0 1.524 0 0; O 3 0.626 1.062 0; CB 0 -0.525 -0.776 -1.212;
  CG 4 0.607 1.377 0; CD1 5 0.709 1.195 0; CD2 5 0.706 -1.196 0; CE1 5 2.102 1.198 0; CE2 5 2.098 -1.201 0;
  CZ 5 2.794 -0.003 -0.001
P PRO: N 0 -0.566 1.351 0; CA 0 0 0 0; C 0 1.527 0 0; O 3 0.621 1.066 0; CB 0 -0.546 -0.611 -1.293;
  CG 4 0.382 1.445 0; CD 5 0.477 1.424 0
S SER: N 0 -0.529 1.36 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.626 1.062 0; CB 0 -0.518 -0.777 -1.211; OG 4 0.503 1.325 0
T THR: N 0 -0.517 1.364 0; CA 0 0 0 0; C 0 1.526 0 0; O 3 0.626 1.062 0; CB 0 -0.516 -0.793 -1.215;
  OG1 4 0.472 1.353 0; CG2 4 0.55 -0.718 -1.228
W TRP: N 0 -0.521 1.363 0; CA 0 0 0 0; C 0 1.525 0 0; O 3 0.627 1.062 0; CB 0 -0.523 -0.776 -1.212; CG 4 0.609 1.37 0;
  CD1 5 0.824 1.091 0; CD2 5 0.854 -1.148 -0.005; NE1 5 2.14 0.69 -0.004; CE2 5 2.186 -0.678 -0.007;
  CE3 5 0.622 -2.53 -0.007; CZ2 5 3.283 -1.543 -0.011; CZ3 5 1.715 -3.389 -0.011; CH2 5 3.028 -2.89 -0.013
Y TYR: N 0 -0.522 1.362 0; CA 0 0 0 0; C 0 1.524 0 0; O 3 0.627 1.062 0; CB 0 -0.522 -0.776 -1.213;
  CG 4 0.607 1.382 0; CD1 5 0.716 1.195 0; CD2 5 0.713 -1.194 -0.001; CE1 5 2.107 1.2 -0.002;
  CE2 5 2.104 -1.201 -0.003; CZ 5 2.791 -0.001 -0.003; OH 5 4.168 -0.002 -0.005
V VAL: N 0 -0.494 1.373 0; CA 0 0 0 0; C 0 1.527 0 0; O 3 0.627 1.062 0; CB 0 -0.533 -0.795 -1.213;
  CG1 4 0.54 1.429 0; CG2 4 0.533 -0.776 1.203
"""
"""Atoms of each residue in the order of atom14: name, group, and ideal position in the group in angstrom."""


def _parsed() -> tuple[dict[str, str], dict[str, list[str]], NDArray[np.int64], NDArray[np.float32]]:
    """Return one-letter to three-letter codes, the atoms of each residue, and group and position of each atom14."""
    names: dict[str, str] = {}
    atoms: dict[str, list[str]] = {}
    group_X14, position_X14_3 = np.zeros((21, 14), np.int64), np.zeros((21, 14, 3), np.float32)
    for line in _ATOMS.strip().replace("\n  ", " ").split("\n"):
        code, listed = line.split(": ")
        one, three = code.split()
        names[one], atoms[one] = three, []
        for slot, atom in enumerate(listed.split("; ")):
            name, group, *position = atom.split()
            atoms[one].append(name)
            group_X14[RESTYPES.index(one), slot] = int(group)
            position_X14_3[RESTYPES.index(one), slot] = position
    return names, atoms, group_X14, position_X14_3


THREE, _LISTED, ATOM14_GROUP, ATOM14_POSITION = _parsed()
"""``THREE``: one-letter to three-letter codes. ``ATOM14_GROUP``: (21, 14) rigid group of each atom.
``ATOM14_POSITION``: (21, 14, 3) its ideal position in the frame of the group, in angstrom."""
ONE = {three: one for one, three in THREE.items()}
"""Three-letter to one-letter codes."""
ATOM14 = [[*_LISTED[one], *[""] * (14 - len(_LISTED[one]))] for one in RESTYPES] + [[""] * 14]
"""Names of the 14 atoms of each residue type, empty behind the last one."""
CHI_ATOMS = [
    [["N", "CA", "CB", *_SIDE_CHAINS[one].split()][chi : chi + 4] for chi in range(len(_SIDE_CHAINS[one].split()))]
    if one in _SIDE_CHAINS
    else []
    for one in RESTYPES
] + [[]]
"""Names of the four atoms of each torsion chi of each residue type."""


def _maps() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    to37_X14, to14_X37 = np.zeros((21, 14), np.int64), np.zeros((21, 37), np.int64)
    mask14_X14, mask37_X37 = np.zeros((21, 14), np.float32), np.zeros((21, 37), np.float32)
    for kind, slot in np.ndindex(21, 14):
        if name := ATOM14[kind][slot]:
            atom = ATOM_TYPES.index(name)
            to37_X14[kind, slot], to14_X37[kind, atom] = atom, slot
            mask14_X14[kind, slot] = mask37_X37[kind, atom] = 1
    return to37_X14, to14_X37, mask14_X14, mask37_X37


ATOM14_TO_ATOM37, ATOM37_TO_ATOM14, ATOM14_MASK, ATOM37_MASK = _maps()
"""(21, 14) and (21, 37) indices of the atoms in the other numbering, 0 for missing atoms, and 1 for existing atoms."""
CHI_MASK = np.array([[chi < len(atoms) for chi in range(CHIS)] for atoms in CHI_ATOMS], np.float32)
"""(21, 4), 1 for an existing torsion."""
CHI_PI_PERIODIC = np.array([[_PERIODIC.get(one) == chi for chi in range(CHIS)] for one in f"{RESTYPES}X"], np.float32)
"""(21, 4), 1 for a torsion whose half turn does not change the residue."""
GROUP_EXISTS = np.concatenate([np.array([[1, 0, 0, 1]] * 21, np.float32), CHI_MASK], 1)
"""(21, 8), 1 for a group whose frame is defined. Unknown residues have the frames of a backbone, but no atoms."""


def _frame(x_3: NDArray[np.float32], y_3: NDArray[np.float32], origin_3: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the frame (4, 4) with the x axis along ``x``, and ``y`` in the xy plane."""
    x_3 = x_3 / np.linalg.norm(x_3)
    y_3 = y_3 - x_3.dot(y_3) * x_3
    y_3 = y_3 / np.linalg.norm(y_3)
    frame_44 = np.eye(4, dtype=np.float32)
    frame_44[:3] = np.stack([x_3, y_3, np.cross(x_3, y_3), origin_3], 1)
    return frame_44


def _default_frames() -> NDArray[np.float32]:
    frame_XG44 = np.tile(np.eye(4, dtype=np.float32), (21, GROUPS, 1, 1))
    for kind, atoms in enumerate(ATOM14[:20]):
        at = dict(zip(atoms, ATOM14_POSITION[kind], strict=True))
        frame_XG44[kind, 2] = _frame(at["N"] - at["CA"], np.array([1, 0, 0], np.float32), at["N"])
        frame_XG44[kind, 3] = _frame(at["C"] - at["CA"], at["CA"] - at["N"], at["C"])
        for chi, names in enumerate(CHI_ATOMS[kind]):
            end_3 = at[names[2]]
            along_3 = end_3 - at["CA"] if chi == 0 else end_3
            side_3 = at["N"] - at["CA"] if chi == 0 else np.array([-1, 0, 0], np.float32)
            frame_XG44[kind, 4 + chi] = _frame(along_3, side_3, end_3)
    return frame_XG44


DEFAULT_FRAMES = _default_frames()
"""(21, 8, 4, 4) frame of each group, at the torsion 0, in the frame of the group before it: the backbone for the groups
up to chi 1, else the previous chi. Missing groups have the identity."""
