"""Synthetic chains in the raw formats: helices, strands and loops with ideal torsions, alignments and template hits.

A chain consists of segments. The residues of a segment are drawn from letters of its kind, and the kind determines all
torsions, so a chain's shape follows from its sequence. Chains come in families: the members have segments of the same
kinds, and random letters of these kinds. The rows of an alignment are further members, with gaps and insertions. The
first member of a family, which was released before the others, is their template. The structures of the evaluation have
two identical chains.
"""

from __future__ import annotations

import datetime
import functools
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.openfold import geometry, raw
from benchmarks.openfold.geometry import ResidueTables
from benchmarks.openfold.raw import CAMEO, CAMEO_COLUMNS, CLUSTERS, DUPLICATES, MMCIF, OBSOLETE
from benchmarks.openfold.residues import ATOM14, RESTYPES, THREE
from benchmarks.openfold.samples import HITS, MSAS
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError
from common.formats.mmcif import encode_category

KINDS = (("AELMQKRH", -57.0, -47.0), ("VIYFWTC", -119.0, 113.0), ("GNPDS", -80.0, 150.0))
"""Letters, phi and psi in degrees of helices, strands and loops."""
CHI = -65.0, 180.0, 180.0, 180.0
"""Torsions of all side chains in degrees."""
BONDS = {"C-N": (1.329, 121.7), "N-CA": (1.458, 111.0), "CA-C": (1.525, 116.6)}
"""Length in angstrom of the bonds of the backbone; angle in degrees with the next bond."""
SEGMENT = 6, 12
"""Fewest and most residues of a segment."""
GAPS, INSERTIONS = 0.05, 0.1
"""Share of gaps in a row; probability of an insertion in it."""
FIRST_DAY, EVAL_DAY = datetime.date(2019, 1, 1), datetime.date(2021, 9, 20)
FAMILY = 4
"""Members of a family."""


@dataclass(frozen=True)
class SyntheticChains(Options):
    """Options of ``generate``."""

    train: Annotated[int, Option("number of training chains", least=1, most=40_000)] = 24
    eval: Annotated[int, Option("number of evaluation chains", least=1, most=5_000)] = 6
    residues: Annotated[tuple[int, int], Option("fewest and most residues of a chain", least=12, most=700)] = 24, 64
    rows: Annotated[int, Option("rows of the alignments of a chain", least=1)] = 48
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        fewest, most = self.residues
        if fewest > most:
            raise ConfigError(f"--residues={fewest} {most}: the fewest first")


def generate(raw_dir: Path, options: SyntheticChains = SyntheticChains(), workers: int = 1) -> str:
    """Write synthetic chains to ``raw_dir``, an empty or new folder, and mark it as synthetic.

    Returns:
        A summary for the user.

    Raises:
        DataError: ``raw_dir`` is not empty.
    """
    plans = [
        (split, number)
        for split, count in (("train", options.train), ("eval", options.eval))
        for number in range(count)
    ]
    with synthetic.generated_folders(raw_dir, "chains with ideal torsions", options, (MMCIF, raw.MSAS)) as folder:
        list(synthetic.drawn(functools.partial(_write, folder, options), plans, workers, 4))
        ids = {plan: _pdb_id(*plan) for plan in plans}
        clusters: dict[tuple[str, int], list[str]] = {}
        for (split, number), pdb_id in ids.items():
            clusters.setdefault((split, number // FAMILY), []).append(f"{pdb_id.upper()}_1")
        evaluated = [ids["eval", number] for number in range(options.eval)]
        lists = {
            OBSOLETE: [f"OBSLTE    31-JUL-94 9ZZZ     {ids['train', 0].upper()}"],
            CLUSTERS: [" ".join(names) for names in clusters.values()],
            DUPLICATES: [f"{pdb_id}_A {pdb_id}_B" for pdb_id in evaluated],
            CAMEO: [",".join(CAMEO_COLUMNS), *(f"{pdb_id}_A,{EVAL_DAY}" for pdb_id in evaluated)],
        }
        for name, lines in lists.items():
            (folder / name).write_text("\n".join([*lines, ""]), encoding="ascii")
    return f"{options.train} chains to train and {options.eval} to evaluate"


def draw(options: SyntheticChains, split: str, number: int) -> tuple[str, NDArray[np.int64], np.random.Generator]:
    """Return the sequence of a chain, the kind of each residue (L,), and a generator for its alignments."""
    key = options.seed, ("train", "eval").index(split)
    family = np.random.default_rng((*key, 0, number // FAMILY))
    length = int(family.integers(*options.residues, endpoint=True))
    kinds: list[int] = []
    while len(kinds) < length:
        kind = int(family.choice([k for k in range(len(KINDS)) if not kinds or k != kinds[-1]]))
        kinds += [kind] * int(family.integers(*SEGMENT, endpoint=True))
    kind_L = np.array(kinds[:length])
    own = np.random.default_rng((*key, 1, number))
    return _letters(kind_L, 1, own)[0].tobytes().decode(), kind_L, own


def positions(sequence: str, kind_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the positions (L, 14, 3) in angstrom of the atoms of a chain, in the numbering atom14."""
    phi_L, psi_L = np.radians([[KINDS[kind][1:] for kind in kind_L]])[0].T
    aatype_L = torch.tensor([RESTYPES.index(letter) for letter in sequence])
    n_L3, ca_L3, c_L3 = torch.from_numpy(_backbone(phi_L, psi_L)).unbind(1)
    angle_L7 = np.concatenate([np.zeros((len(psi_L), 2)), psi_L[:, None], np.radians([CHI] * len(psi_L))], 1)
    sincos_L72 = torch.from_numpy(np.stack([np.sin(angle_L7), np.cos(angle_L7)], 2))
    tables = ResidueTables(sincos_L72)
    backbone = geometry.frames_from_points(c_L3 - ca_L3, ca_L3, n_L3)
    groups = geometry.group_frames(tables, aatype_L, backbone, sincos_L72)
    return geometry.atoms14(tables, aatype_L, groups).numpy()


def _backbone(phi_L: NDArray[np.float64], psi_L: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the positions (L, 3, 3) of N, CA and C; all omega are half a turn."""
    atoms = [np.array([-0.5, 1.36, 0.0]), np.zeros(3), np.array([1.525, 0, 0])]
    for residue in range(1, len(phi_L)):
        for bond, before, torsion in (
            ("C-N", "CA-C", psi_L[residue - 1]), ("N-CA", "C-N", np.pi), ("CA-C", "N-CA", phi_L[residue]),
        ):  # fmt: skip
            length, angle = BONDS[bond][0], np.radians(BONDS[before][1])
            a, b, c = atoms[-3:]
            along = _unit(c - b)
            normal = _unit(np.cross(b - a, along))
            local = length * np.array(
                [-np.cos(angle), np.sin(angle) * np.cos(torsion), np.sin(angle) * np.sin(torsion)]
            )
            atoms.append(c + local[0] * along + local[1] * np.cross(normal, along) + local[2] * normal)
    return np.array(atoms).reshape(-1, 3, 3)


def _unit(vector_X3: NDArray[np.float64]) -> NDArray[np.float64]:
    return vector_X3 / np.linalg.norm(vector_X3, axis=-1, keepdims=True)


def _letters(kind_L: NDArray[np.int64], rows: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return random letters (rows, L) of the kinds, as ASCII."""
    table = np.array([list((letters * 8)[:8].encode()) for letters, _, _ in KINDS], np.uint8)
    return table[kind_L, random.integers(8, size=(rows, len(kind_L)))]


def _write(folder: Path, options: SyntheticChains, plan: tuple[str, int]) -> None:
    split, number = plan
    pdb_id = _pdb_id(split, number)
    sequence, kind_L, random = draw(options, split, number)
    day = EVAL_DAY if split == "eval" else FIRST_DAY + datetime.timedelta(100 * (number % FAMILY))
    first = draw(options, split, number - number % FAMILY)[0]
    chains = "AB" if split == "eval" else "A"
    text = encode_structure(pdb_id, sequence, positions(sequence, kind_L), day, chains)
    (folder / MMCIF / pdb_id[1:3]).mkdir(exist_ok=True)
    with open(folder / MMCIF / pdb_id[1:3] / f"{pdb_id}.cif.gz", "wb") as file:
        file.write(gzip.compress(text.encode(), 6, mtime=0))
    alignments = folder / raw.MSAS / f"{pdb_id}_A"
    for name in ("a3m", "hhr"):
        (alignments / name).mkdir(parents=True)
    letters_RL = _letters(kind_L, options.rows, random)
    letters_RL[random.random(letters_RL.shape) < GAPS] = ord("-")
    for part, name in enumerate(MSAS):
        rows = [sequence.encode(), *(row.tobytes() for row in letters_RL[part :: len(MSAS)])]
        for row in np.flatnonzero(random.random(len(rows)) < INSERTIONS):
            place = int(random.integers(1, len(sequence))) if row else len(sequence)
            rows[row] = rows[row][:place] + b"acdef"[: row % 5] + rows[row][place:]
        content = b"".join(b">row%d\n%s\n" % (row, letters) for row, letters in enumerate(rows))
        (alignments / "a3m" / name).write_bytes(content)
    hit = encode_hit(sequence, first, f"{_pdb_id(split, number - number % FAMILY)}_A") if number % FAMILY else ""
    (alignments / "hhr" / HITS).write_text(f"Query {pdb_id}_A\n\n{hit}", encoding="ascii")


def _pdb_id(split: str, number: int) -> str:
    digits = np.base_repr(number % 46656, 36).lower().zfill(3)
    return f"{1 if split == 'train' else 8}{digits[1:]}{digits[0]}"


def encode_structure(
    pdb_id: str, sequence: str, position_LA3: NDArray[np.float64], day: datetime.date, copies: str = "A"
) -> str:
    """Return an mmCIF file with copies of a chain, 60 angstrom apart; their names are the letters of ``copies``."""
    names = [THREE[letter] for letter in sequence]
    rows = [
        (chain, str(residue + 1), names[residue], atom, *(f"{value:.3f}" for value in place))
        for copy, chain in enumerate(copies)
        for residue, letter in enumerate(sequence)
        for atom, place in zip(ATOM14[RESTYPES.index(letter)], position_LA3[residue] + (0, 0, 60 * copy), strict=True)
        if atom
    ]
    chains, numbers, residues, atoms, *places = map(list, zip(*rows, strict=True))
    count = len(rows)
    categories = {
        "entry": {"id": [pdb_id.upper()]},
        "exptl": {"method": ["X-RAY DIFFRACTION"]},
        "refine": {"ls_d_res_high": ["2.00"]},
        "pdbx_audit_revision_history": {"ordinal": ["1"], "revision_date": [day.isoformat()]},
        "entity_poly": {"entity_id": ["1"], "type": ["polypeptide(L)"], "pdbx_seq_one_letter_code_can": [sequence]},
        "entity_poly_seq": {
            "entity_id": ["1"] * len(sequence),
            "num": [str(number + 1) for number in range(len(sequence))],
            "mon_id": names,
        },
        "struct_asym": {"id": list(copies), "entity_id": ["1"] * len(copies)},
        "atom_site": {
            "group_PDB": ["ATOM"] * count,
            "id": [str(number + 1) for number in range(count)],
            "label_atom_id": atoms,
            "label_alt_id": [""] * count,
            "label_comp_id": residues,
            "label_asym_id": chains,
            "label_seq_id": numbers,
            **{f"Cartn_{axis}": values for axis, values in zip("xyz", places, strict=True)},
            "occupancy": ["1.00"] * count,
            "auth_asym_id": chains,
            "pdbx_PDB_model_num": ["1"] * count,
        },
    }
    return f"data_{pdb_id.upper()}\n#\n" + "".join(encode_category(*item) for item in categories.items())


def encode_hit(query: str, template: str, name: str) -> str:
    """Return an HHR hit without gaps, in rows of 80 columns."""
    lines = [
        "No 1", f">{name} synthetic chain",
        f"Probab=99.9  E-value=1E-30  Score=100.0  Aligned_cols={len(query)}  Sum_probs={len(query):.1f}",
        "",
    ]  # fmt: skip
    for first in range(0, len(query), 80):
        for side, row, chain in (("Q", query, "query"), ("T", template, name)):
            part = row[first : first + 80]
            lines.append(f"{side} {chain:14} {first + 1:4} {part} {first + len(part):4} ({len(row)})")
        lines.append("")
    return "\n".join([*lines, ""])
