"""Small synthetic chains for the tests of OpenFold's data."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.openfold.features import FeatureSizes
from benchmarks.openfold.prepare import prepare
from benchmarks.openfold.samples import CHAINS
from benchmarks.openfold.synthetic import SyntheticChains, generate

TRAIN, EVAL, FOLDS = 8, 3, 2
SIZES = FeatureSizes(crop_size=32, msa_clusters=16, extra_msa=24, templates=4, recycling_iters=3)


def raw(folder: Path, **options: object) -> Path:
    generate(folder, SyntheticChains(**{"train": TRAIN, "eval": EVAL, "rows": 30, "folds": FOLDS} | options))
    return folder


def rows(data: Path) -> dict[str, dict[str, str]]:
    """Return the rows of ``chains.csv`` by the names of the chains."""
    with open(data / CHAINS, newline="", encoding="utf-8") as file:
        return {row["pdb_chain_id"]: row for row in csv.DictReader(file)}


def prepared(folder: Path) -> Path:
    prepare(raw(folder / "raw"), folder / "data")
    return folder / "data"
