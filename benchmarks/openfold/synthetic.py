"""Synthetic chains (:mod:`benchmarks.openfold.folds`) in the raw formats: structures, alignments and template hits.

All chains of a family have the same fold, with different letters. The first training chain of a family was released
before the others and is their template. The chains of the evaluation belong to the same families, because most new
proteins have a known fold; their structures have two identical chains.
"""

from __future__ import annotations

import datetime
import functools
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from benchmarks.openfold import raw
from benchmarks.openfold.folds import Chain, draw_chain, draw_fold, draw_homologues
from benchmarks.openfold.raw import CAMEO, CAMEO_COLUMNS, CLUSTERS, DUPLICATES, MMCIF, OBSOLETE
from benchmarks.openfold.residues import ATOM14, RESTYPES, THREE
from benchmarks.openfold.samples import HITS, MSAS
from common.data import synthetic
from common.data.options import Option, Options
from common.errors import ConfigError
from common.formats.mmcif import encode_category

FIRST_DAY, EVAL_DAY = datetime.date(2019, 1, 1), datetime.date(2021, 9, 20)
SPLITS = "train", "eval"


@dataclass(frozen=True)
class SyntheticChains(Options):
    """Options of ``generate``."""

    train: Annotated[int, Option("number of training chains", least=1, most=40_000)] = 24
    eval: Annotated[int, Option("number of evaluation chains", least=1, most=5_000)] = 6
    residues: Annotated[tuple[int, int], Option("fewest and most residues of a chain", least=12, most=700)] = 24, 64
    rows: Annotated[int, Option("rows of the alignments of a chain", least=1)] = 48
    folds: Annotated[int, Option("number of families; all chains of a family have the same fold", least=1)] = 8
    seed: Annotated[int, Option(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        fewest, most = self.residues
        if fewest > most:
            raise ConfigError(f"--residues={fewest} {most}: the fewest first")

    @property
    def families(self) -> int:
        """Number of families; each has a training chain."""
        return min(self.folds, self.train)


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
    with synthetic.generated_folders(
        raw_dir, "chains of ideal helices and hairpins", options, (MMCIF, raw.MSAS)
    ) as folder:
        list(synthetic.drawn(functools.partial(_write, folder, options), plans, workers, 4))
        ids = {plan: _pdb_id(*plan) for plan in plans}
        clusters: dict[tuple[str, int], list[str]] = {}
        for (split, number), pdb_id in ids.items():
            clusters.setdefault((split, number % options.families), []).append(f"{pdb_id.upper()}_1")
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


def draw(options: SyntheticChains, split: str, number: int) -> tuple[Chain, np.random.Generator]:
    """Return a chain, and a generator for its alignments."""
    own = np.random.default_rng((options.seed, SPLITS.index(split), 1, number))
    return draw_chain(_fold(options.seed, *options.residues, number % options.families), own), own


@functools.lru_cache(maxsize=64)
def _fold(seed: int, fewest: int, most: int, family: int) -> NDArray[np.int64]:
    random = np.random.default_rng((seed, 0, 0, family))
    return draw_fold(int(random.integers(fewest, most, endpoint=True)), random)


@functools.lru_cache(maxsize=64)
def _template(options: SyntheticChains, family: int) -> str:
    """Return the sequence of the first training chain of a family."""
    return draw(options, "train", family)[0].sequence


def _write(folder: Path, options: SyntheticChains, plan: tuple[str, int]) -> None:
    split, number = plan
    pdb_id = _pdb_id(split, number)
    chain, random = draw(options, split, number)
    sequence = chain.sequence
    family, has_template = number % options.families, split == "eval" or number >= options.families
    day = EVAL_DAY if split == "eval" else FIRST_DAY + datetime.timedelta(100 * has_template)
    first = _template(options, family)
    chains = "AB" if split == "eval" else "A"
    text = encode_structure(pdb_id, sequence, chain.atoms_LA3, day, chains)
    (folder / MMCIF / pdb_id[1:3]).mkdir(exist_ok=True)
    with open(folder / MMCIF / pdb_id[1:3] / f"{pdb_id}.cif.gz", "wb") as file:
        file.write(gzip.compress(text.encode(), 6, mtime=0))
    alignments = folder / raw.MSAS / f"{pdb_id}_A"
    for name in ("a3m", "hhr"):
        (alignments / name).mkdir(parents=True)
    homologues = draw_homologues(chain, options.rows, random)
    for part, name in enumerate(MSAS):
        rows = [sequence.encode(), *homologues[part :: len(MSAS)]]
        content = b"".join(b">row%d\n%s\n" % (row, letters) for row, letters in enumerate(rows))
        (alignments / "a3m" / name).write_bytes(content)
    hit = encode_hit(sequence, first, f"{_pdb_id('train', family)}_A") if has_template else ""
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
