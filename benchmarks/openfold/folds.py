"""Synthetic folds: backbones of ideal alpha helices and beta hairpins, sequences that predict them, and homologues.

A fold consists of helices and hairpins, with loops between them. A hairpin has two antiparallel strands of equal length
and a turn of type II' between them, whose torsions let all hydrogen bonds close. Each residue has a kind, which
determines its torsions, and most residues have a letter that is frequent in their kind. All chains of a family have
the same fold, with different letters.

Axes: L residues of a chain, A = 14 atom slots, R rows of an alignment.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.openfold import geometry
from benchmarks.openfold.geometry import ResidueTables
from benchmarks.openfold.residues import ATOM14_MASK, ATOM14_POSITION, CA, RESTYPES


class Kind(NamedTuple):
    """Frequent letters, and phi and psi in degrees, of the residues of one kind."""

    letters: str
    phi: float
    psi: float


HELIX, STRAND, TURN_1, TURN_2, EXTENDED, BENT = range(6)
KINDS = (
    Kind("AELMQKRH", -57.0, -47.0), Kind("VIYFWC", -129.0, 124.0), Kind("G", 56.0, -132.0), Kind("ND", -84.0, 27.0),
    Kind("PT", -75.0, 145.0), Kind("S", -75.0, -20.0),
)  # fmt: skip
"""Loops have extended and bent residues."""
HELIX_RESIDUES, STRAND_RESIDUES, LOOP_RESIDUES = (8, 13), (3, 5), (2, 3)
"""Fewest and most residues of a helix, of each strand of a hairpin, and of a loop."""
NOISE = 0.1
"""Share of residues with any letter except glycine and proline, whose torsions are special."""
DIVERGENCE = 0.1, 0.8
"""Range of the probability that a residue of a homologue was replaced; each homologue has its own."""
TRUNCATED, GAPPED, INSERTED = 0.3, 0.3, 0.2
"""Probabilities that a homologue lacks one end (for each end), lacks parts of loops, or has an insertion in a loop."""
LARGEST_TRUNCATION = 0.3
"""Largest share of the residues that a homologue lacks at an end."""
CONTACT, FOLD_CONTACT = 2.5, 2.65
"""Smallest distance in angstrom of two atoms of residues that are not neighbours: in a chain, and in its fold. The
second is larger because folds are drawn with alanine, and other residues have other bond angles."""
REACH = 8.0
"""Largest distance in angstrom of an atom from the CA of its residue; arginine has 7.4."""
CHI, PROLINE_CHI = (-65.0, 180.0, 180.0, 180.0), (30.0, -36.0, 0.0, 0.0)
"""Torsions of side chains in degrees."""
PEPTIDE, CA_C_N, C_N_CA = 1.329, 116.6, 121.7
"""Length of the peptide bond in angstrom; bond angles at its C and at its N in degrees (Engh and Huber, 1991)."""
_ATTEMPTS = 20
_ANY = "ACDEFHIKLMNQRSTVWY"


class Chain(NamedTuple):
    """A chain: its letters, the kind of each residue (L,), and its atoms (L, 14, 3) in angstrom."""

    sequence: str
    kind_L: NDArray[np.int64]
    atoms_LA3: NDArray[np.float64]


def draw_fold(length: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return the kind of each residue (L,) of a fold whose backbone and CB atoms have no contacts.

    Helices and hairpins take turns, with loops between them. Segments are added one by one, and the last one is cut at
    ``length``. If no attempt to add a segment succeeds, the last four segments are removed.
    """
    segments: list[NDArray[np.int64]] = []
    backbone_L33, atoms_LA3 = np.empty((0, 3, 3)), np.empty((0, 14, 3))
    while (used := sum(map(len, segments))) < length:
        if not segments:
            first = int(random.integers(2))
        for _ in range(_ATTEMPTS):
            kind_L = np.concatenate([*segments, _segment(len(segments) + 2 * first, random)])[:length]
            sequence = _smallest(kind_L).tobytes().decode()
            longer_L33 = _backbone(sequence, kind_L, backbone_L33[:used])
            added_LA3 = _all_atoms(sequence[used:], kind_L[used:], longer_L33[used:])
            longer_LA3 = np.concatenate([atoms_LA3[:used], added_LA3])
            if not _near(sequence, longer_LA3, used, FOLD_CONTACT).any():
                segments.append(kind_L[used:])
                backbone_L33, atoms_LA3 = longer_L33, longer_LA3
                break
        else:
            del segments[-4:]
    return kind_L


def _segment(number: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return the kinds of a segment: a loop if ``number`` is odd, a helix if 4 divides it, otherwise a hairpin."""
    if number % 2:
        return random.choice((EXTENDED, BENT), random.integers(*LOOP_RESIDUES, endpoint=True))
    if number % 4 == 0:
        return np.full(random.integers(*HELIX_RESIDUES, endpoint=True), HELIX)
    strand = [STRAND] * int(random.integers(*STRAND_RESIDUES, endpoint=True))
    return np.array([*strand, TURN_1, TURN_2, *strand])


def _smallest(kind_L: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the letters (L,), as ASCII, with the smallest side chains that fit the kinds."""
    return np.where(kind_L == TURN_1, ord("G"), ord("A")).astype(np.uint8)


def draw_chain(kind_L: NDArray[np.int64], random: np.random.Generator) -> Chain:
    """Return a chain of a fold.

    Letters whose side chains come too close to other residues are drawn again and finally become alanine.
    """
    letter_L = draw_letters(kind_L, 1, random)[0]
    for attempt in range(2 * _ATTEMPTS):
        sequence = letter_L.tobytes().decode()
        atoms_LA3 = positions(sequence, kind_L)
        near_L = _near(sequence, atoms_LA3)
        if not near_L.any():
            return Chain(sequence, kind_L, atoms_LA3)
        other_L = draw_letters(kind_L, 1, random)[0] if attempt < _ATTEMPTS else _smallest(kind_L)
        letter_L = np.where(near_L, other_L, letter_L)
    raise AssertionError(f"no letters fit the fold {kind_L.tolist()}")


def _near(sequence: str, atoms_LA3: NDArray[np.float64], first: int = 0, contact: float = CONTACT) -> NDArray[np.bool_]:
    """Return which residues (L,) are in contact with residues that are not their neighbours.

    Args:
        first: contacts between two residues before this one are not searched.
        contact: smallest distance in angstrom that is no contact.
    """
    exists_LA = ATOM14_MASK[[RESTYPES.index(letter) for letter in sequence]] > 0
    between_XL3 = atoms_LA3[first:, None, CA] - atoms_LA3[:, CA]
    close_XL = np.tril((between_XL3**2).sum(-1) < (contact + 2 * REACH) ** 2, first - 2)
    i_P, j_P = np.nonzero(close_XL)
    i_P = i_P + first
    squared_PAA = ((atoms_LA3[i_P, :, None] - atoms_LA3[j_P, None]) ** 2).sum(-1)
    contact_PAA = (squared_PAA < contact**2) & exists_LA[i_P, :, None] & exists_LA[j_P, None]
    contact_P = contact_PAA.any((1, 2))
    near_L = np.zeros(len(sequence), np.bool_)
    near_L[i_P[contact_P]] = near_L[j_P[contact_P]] = True
    return near_L


def positions(sequence: str, kind_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the atoms (L, 14, 3) of a chain in angstrom, with the ideal geometry of each residue."""
    return _all_atoms(sequence, kind_L, _backbone(sequence, kind_L, np.empty((0, 3, 3))))


def _all_atoms(sequence: str, kind_L: NDArray[np.int64], backbone_L33: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the atoms (L, 14, 3) of a chain whose backbone is known."""
    n_L3, ca_L3, c_L3 = torch.from_numpy(backbone_L33).unbind(1)
    psi_L1 = np.radians([[KINDS[kind].psi] for kind in kind_L])
    chi_L4 = np.radians([PROLINE_CHI if letter == "P" else CHI for letter in sequence])
    angle_L7 = np.concatenate([np.zeros((len(sequence), 2)), psi_L1, chi_L4], 1)
    sincos_L72 = torch.from_numpy(np.stack([np.sin(angle_L7), np.cos(angle_L7)], 2))
    tables = ResidueTables(sincos_L72)
    aatype_L = torch.tensor([RESTYPES.index(letter) for letter in sequence])
    groups = geometry.group_frames(tables, aatype_L, geometry.frames_from_points(c_L3 - ca_L3, ca_L3, n_L3), sincos_L72)
    return geometry.atoms14(tables, aatype_L, groups).numpy()


def _backbone(sequence: str, kind_L: NDArray[np.int64], known_K33: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the atoms N, CA and C (L, 3, 3) in angstrom, placed one after the other; all omega are 180 degrees.

    Args:
        known_K33: atoms of the first K residues, if they are known.
    """
    local_L33 = ATOM14_POSITION[[RESTYPES.index(letter) for letter in sequence], :3].astype(np.float64)
    torsion_L2 = np.radians([KINDS[kind][1:] for kind in kind_L])
    atoms = [*known_K33.reshape(-1, 3)] or [*local_L33[0]]
    for residue in range(len(atoms) // 3, len(sequence)):
        n_3, _, c_3 = local_L33[residue]
        to_n, to_c = float(np.linalg.norm(n_3)), float(np.linalg.norm(c_3))
        at_ca = float(np.arccos(n_3 @ c_3 / (to_n * to_c)))
        for length, angle, torsion in (
            (PEPTIDE, np.radians(CA_C_N), torsion_L2[residue - 1, 1]),
            (to_n, np.radians(C_N_CA), np.pi),
            (to_c, at_ca, torsion_L2[residue, 0]),
        ):
            atoms.append(_placed(atoms[-3:], length, angle, torsion))
    return np.array(atoms).reshape(-1, 3, 3)


def _placed(last: list[NDArray[np.float64]], length: float, angle: float, torsion: float) -> NDArray[np.float64]:
    """Return the position of an atom from the last three atoms, its bond, and the angles of this bond in radians."""
    a, b, c = last
    x = (c - b) / np.sqrt((c - b) @ (c - b))
    y = (a - b) - ((a - b) @ x) * x
    y = y / np.sqrt(y @ y)
    z = np.array([x[1] * y[2] - x[2] * y[1], x[2] * y[0] - x[0] * y[2], x[0] * y[1] - x[1] * y[0]])
    side = np.sin(angle) * (np.cos(torsion) * y + np.sin(torsion) * z)
    return np.asarray(c + length * (side - np.cos(angle) * x))


def draw_letters(kind_L: NDArray[np.int64], rows: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return letters (rows, L) as ASCII. The first residue of a turn is glycine, which alone has its torsions."""
    table_K8 = np.array([list((kind.letters * 8)[:8].encode()) for kind in KINDS], np.uint8)
    usual_RL = table_K8[kind_L, random.integers(8, size=(rows, len(kind_L)))]
    other_RL = np.frombuffer(_ANY.encode(), np.uint8)[random.integers(len(_ANY), size=usual_RL.shape)]
    noisy_RL = (random.random(usual_RL.shape) < NOISE) & (kind_L != TURN_1)
    return np.where(noisy_RL, other_RL, usual_RL)


def draw_homologues(chain: Chain, rows: int, random: np.random.Generator) -> list[bytes]:
    """Return rows of an alignment with ``chain``, in A3M: gaps are ``-``, and insertions are lower-case letters.

    Some residues of a fold are replaced more often than others. Gaps are in loops, or at an end of the chain.
    """
    kind_L, length = chain.kind_L, len(chain.sequence)
    query_L = np.frombuffer(chain.sequence.encode(), np.uint8)
    rate_L = random.uniform(0, 2, length)
    replaced_RL = random.random((rows, length)) < random.uniform(*DIVERGENCE, (rows, 1)) * rate_L
    flexible_L, place_L = kind_L >= TURN_1, np.arange(length)
    homologues = []
    for letter_L in np.where(replaced_RL, draw_letters(kind_L, rows, random), query_L):
        first, behind = random.uniform(0, LARGEST_TRUNCATION, 2) * (random.random(2) < TRUNCATED) * length
        missing_L = (place_L < first) | (place_L >= length - behind)
        if random.random() < GAPPED:
            missing_L |= flexible_L & (random.random(length) < 0.5)
        row = np.where(missing_L, ord("-"), letter_L).astype(np.uint8).tobytes()
        if flexible_L.any() and random.random() < INSERTED:
            at = int(random.choice(np.flatnonzero(flexible_L)))
            inserted = draw_letters(np.full(random.integers(1, 5), BENT), 1, random)[0].tobytes().lower()
            row = row[:at] + inserted + row[at:]
        homologues.append(row)
    return homologues
