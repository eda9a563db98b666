"""Small synthetic chains for the tests of OpenFold's data."""

from __future__ import annotations

from pathlib import Path

from benchmarks.openfold.features import FeatureSizes
from benchmarks.openfold.prepare import prepare
from benchmarks.openfold.synthetic import SyntheticChains, generate

TRAIN, EVAL = 8, 3
SIZES = FeatureSizes(crop_size=32, msa_clusters=16, extra_msa=24, templates=4, recycling_iters=3)


def raw(folder: Path, **options: object) -> Path:
    generate(folder, SyntheticChains(**{"train": TRAIN, "eval": EVAL, "rows": 30} | options))
    return folder


def prepared(folder: Path) -> Path:
    prepare(raw(folder / "raw"), folder / "data")
    return folder / "data"
