"""Synthetic folds beside published geometry of proteins; letters and homologues of their residues."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.openfold.folds import (
    BENT,
    EXTENDED,
    HELIX,
    KINDS,
    STRAND,
    TURN_1,
    TURN_2,
    Chain,
    draw_chain,
    draw_fold,
    draw_homologues,
    draw_letters,
    positions,
)
from benchmarks.openfold.residues import ATOM14
from benchmarks.openfold.synthetic import SyntheticChains, draw

N, CA, C, O, CB = range(5)  # noqa: E741
HAIRPIN = [STRAND] * 5 + [TURN_1, TURN_2] + [STRAND] * 5


def drawn(seed: int, length: int = 32) -> Chain:
    random = np.random.default_rng(seed)
    return draw_chain(draw_fold(length, random), random)


def distances(first_X3: np.ndarray, second_X3: np.ndarray) -> np.ndarray:
    return np.linalg.norm(first_X3 - second_X3, axis=-1)


def angle(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    cosine = ((a - b) * (c - b)).sum(-1) / (distances(a, b) * distances(c, b))
    return np.degrees(np.arccos(cosine))


def dihedral(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> float:
    first, second = np.cross(b - a, c - b), np.cross(c - b, d - c)
    along = (c - b) / np.linalg.norm(c - b)
    return float(np.degrees(np.arctan2(np.cross(first, second) @ along, first @ second)))


def test_bonds_and_angles_of_the_backbone_are_those_of_engh_and_huber() -> None:
    for seed in range(6):
        atoms = drawn(seed).atoms_LA3
        n, ca, c = atoms[:, N], atoms[:, CA], atoms[:, C]
        assert distances(n, ca) == pytest.approx(1.458, abs=0.02)
        assert distances(ca, c) == pytest.approx(1.525, abs=0.015)
        assert distances(c[:-1], n[1:]) == pytest.approx(1.329, abs=1e-5)
        assert distances(ca[:-1], ca[1:]) == pytest.approx(3.8, abs=0.02)
        assert angle(n, ca, c) == pytest.approx(111.0, abs=2.5)
        assert angle(ca[:-1], c[:-1], n[1:]) == pytest.approx(116.6, abs=1e-3)
        assert angle(c[:-1], n[1:], ca[1:]) == pytest.approx(121.7, abs=1e-3)


def test_torsions_are_those_of_the_kinds() -> None:
    for seed in range(4):
        chain = drawn(seed)
        n, ca, c, o = (chain.atoms_LA3[:, atom] for atom in (N, CA, C, O))
        for residue in range(1, len(chain.sequence) - 1):
            _, phi, psi = KINDS[chain.kind_L[residue]]
            assert dihedral(c[residue - 1], n[residue], ca[residue], c[residue]) == pytest.approx(phi, abs=0.01)
            assert dihedral(n[residue], ca[residue], c[residue], n[residue + 1]) == pytest.approx(psi, abs=0.01)
            assert abs(dihedral(ca[residue], c[residue], n[residue + 1], ca[residue + 1])) == pytest.approx(180)
            assert abs(dihedral(n[residue + 1], ca[residue], c[residue], o[residue])) == pytest.approx(180, abs=4)


def test_helices_rise_by_1_5_angstrom_and_bond_to_the_fourth_residue() -> None:
    atoms = positions("AELMQKRHAELMQKRHAEL", np.full(19, HELIX))
    assert np.linalg.norm(atoms[18, CA] - atoms[0, CA]) / 18 == pytest.approx(1.5, abs=0.1)
    assert distances(atoms[:-4, O], atoms[4:, N]) == pytest.approx(3.0, abs=0.2)
    assert distances(atoms[:-4, CA], atoms[4:, CA]) == pytest.approx(6.2, abs=0.3)


def test_strands_rise_by_3_3_angstrom() -> None:
    atoms = positions("VIYFWCVIYFW", np.full(11, STRAND))
    assert np.linalg.norm(atoms[10, CA] - atoms[0, CA]) / 10 == pytest.approx(3.3, abs=0.15)


def test_strands_of_a_hairpin_are_bonded_and_a_sheet_apart() -> None:
    """Every second pair has two bonds between N and O, of 2.9 angstrom; CA atoms are 4.5 and 5.5 angstrom apart."""
    atoms = positions("VIYFVGNVTIYV", np.array(HAIRPIN))
    for pair in range(5):
        left, right = atoms[4 - pair], atoms[7 + pair]
        assert np.linalg.norm(left[CA] - right[CA]) == pytest.approx((5.5, 4.5)[pair % 2], abs=0.7)
        if pair % 2 == 0:
            assert np.linalg.norm(left[N] - right[O]) == pytest.approx(3.1, abs=0.5)
            assert np.linalg.norm(left[O] - right[N]) == pytest.approx(3.1, abs=0.6)


@pytest.mark.parametrize(("length", "seeds"), [(32, 12), (200, 1)])
def test_atoms_of_residues_that_are_not_neighbours_do_not_touch(length: int, seeds: int) -> None:
    for seed in range(seeds):
        chain = drawn(seed, length)
        found = [
            (residue, atom)
            for residue, letter in enumerate(chain.sequence)
            for slot, name in enumerate(ATOM14["ARNDCQEGHILKMFPSTWYV".index(letter)])
            if name
            for atom in [chain.atoms_LA3[residue, slot]]
        ]
        residue_X, atom_X3 = np.array([one for one, _ in found]), np.array([atom for _, atom in found])
        apart = np.abs(residue_X[:, None] - residue_X) > 1
        assert distances(atom_X3[:, None], atom_X3)[apart].min() >= 2.5


def test_folds_have_helices_and_whole_hairpins_between_loops() -> None:
    random = np.random.default_rng(0)
    text = ["".join("HE12LB"[kind] for kind in draw_fold(40, random)) for _ in range(8)]
    assert all(re.fullmatch(r"((H{8,13}|(E{3,5})12\3)[LB]{2,3})+(H*|E*(12?E*)?)[LB]*", fold) for fold in text)
    assert sum("H" in fold for fold in text) >= 3
    assert sum("12" in fold for fold in text) >= 3


@pytest.mark.parametrize("kind", [HELIX, STRAND, TURN_2, EXTENDED, BENT])
def test_nine_of_ten_letters_are_those_of_the_kind(kind: int) -> None:
    letters = draw_letters(np.full(1000, kind), 10, np.random.default_rng(2)).tobytes().decode()
    usual = KINDS[kind].letters
    expected = 0.9 + 0.1 * sum(letter not in "GP" for letter in usual) / 18
    assert sum(letter in usual for letter in letters) / 10_000 == pytest.approx(expected, abs=0.012)


def test_turns_have_glycine_first() -> None:
    assert set(draw_letters(np.full(100, TURN_1), 3, np.random.default_rng(0)).tobytes().decode()) == {"G"}


def test_homologues_keep_the_columns_and_differ_from_the_chain_as_configured() -> None:
    """Aligned rows have all columns, lack residues in loops or at ends, and differ the most where the site is fast."""
    chain = drawn(0)
    rows = [row.decode() for row in draw_homologues(chain, 600, np.random.default_rng(1))]
    aligned = [re.sub("[a-z]", "", row) for row in rows]
    assert {len(row) for row in aligned} == {len(chain.sequence)}
    assert 0.1 < np.mean([len(row) > len(chain.sequence) for row in rows]) < 0.3
    identity = [np.mean([a == b for a, b in zip(row, chain.sequence, strict=True) if a != "-"]) for row in aligned]
    assert min(identity) < 0.45 < 0.6 < np.mean(identity) < 0.8 < max(identity)
    stable = chain.kind_L < TURN_1
    inner = [row.strip("-") for row in aligned]
    assert any("-" in row for row in inner)
    for row, whole in zip(inner, aligned, strict=True):
        first = whole.index(row)
        assert not any(letter == "-" and stable[first + index] for index, letter in enumerate(row))


def test_evaluated_chains_have_folds_of_training_chains_and_other_letters() -> None:
    options = SyntheticChains(train=7, eval=4, residues=(24, 28), folds=3)
    first = [draw(options, "train", family)[0] for family in range(3)]
    assert len({tuple(chain.kind_L) for chain in first}) == 3
    for split, number in (("train", 5), ("eval", 0), ("eval", 3)):
        chain, own = draw(options, split, number)[0], first[number % 3]
        assert chain.kind_L.tolist() == own.kind_L.tolist()
        assert 0 < np.mean([a == b for a, b in zip(chain.sequence, own.sequence, strict=True)]) < 0.7
