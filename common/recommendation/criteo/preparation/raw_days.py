"""The raw folder: days of the log as text or parquet, or the published multi-hot data set."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.data import synthetic
from common.data.raw_layout import find_file
from common.errors import DataError
from common.recommendation.criteo.preparation.parquet_parts import DAY_FOLDERS, parts_of
from common.recommendation.criteo.preparation.tsv import SAMPLE
from common.recommendation.criteo.sample_rows import DAYS

TEXT, PARQUET, MULTI_HOT = "text", "parquet", "multi-hot"
"""Forms of a raw folder."""
_ENDS = 1 << 16  # bytes at the start and at the end of a file that enter its fingerprint

PUBLISHED_ROWS = (
    *(195_841_983, 199_563_535, 196_792_019, 181_115_208, 152_115_810, 172_548_507, 204_846_845, 200_801_003),
    *(193_772_492, 198_424_372, 185_778_055, 153_588_700, 169_003_364, 194_216_520, 194_081_279, 187_154_596),
    *(177_984_934, 163_382_602, 142_061_091, 156_534_237, 193_627_464, 192_215_183, 189_747_893, 178_274_637),
)
"""Samples of each published day."""
PUBLISHED_COUNTS = {"train_samples": sum(PUBLISHED_ROWS[:-1]), "eval_samples": -(-PUBLISHED_ROWS[-1] // 2)}
"""Samples of the prepared data; the first half of the last day is evaluated."""


def multi_hot_names(day: int) -> tuple[str, str, str]:
    """Return the file names of a day of the published multi-hot set: labels, dense features, ids."""
    return f"day_{day}_labels.npy", f"day_{day}_dense.npy", f"day_{day}_sparse_multi_hot.npz"


@dataclass(frozen=True)
class RawDays:
    """A raw folder.

    Attributes:
        form: ``TEXT`` with one file per day, ``PARQUET`` with a folder of files per day, or ``MULTI_HOT``, the
            published set with the files of :func:`multi_hot_names`.
        files: files of every day, in the order of the days.
        synthetic: description of synthetic data; None for real data.
    """

    folder: Path
    form: str
    files: tuple[tuple[Path, ...], ...]
    synthetic: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Return SHA-256 over names, sizes, starts and ends of all files; reads 128 KiB of each."""
        return fingerprint_of(self.folder, (path for day in self.files for path in day), self.synthetic)

    def check_rows(self, day: int, rows: int) -> None:
        """Refuse an incomplete real day.

        Raises:
            DataError: the number of samples differs from the published one.
        """
        if self.synthetic is not None or rows == PUBLISHED_ROWS[day]:
            return
        if self.form == PARQUET:
            name = f"{DAY_FOLDERS[day]} with its {len(self.files[day])} parts"
            reason = "Parts are missing" if rows < PUBLISHED_ROWS[day] else "Parts of several versions are there"
            remedy = f"{reason}; 'mlperf-suite download' names the parts of a day"
        else:
            name = ", ".join(path.name for path in self.files[day])
            remedy = SAMPLE if self.form == TEXT else "These are not the files of the published multi-hot set"
        raise DataError(f"{self.folder}: {name} has {rows:,} samples and not {PUBLISHED_ROWS[day]:,}. {remedy}")


def fingerprint_of(folder: Path, files: Iterable[Path], described: Mapping[str, Any] | None) -> str:
    """Return SHA-256 over relative names, sizes, starts and ends of ``files``; reads 128 KiB of each.

    Args:
        described: description of synthetic data; None for real data.
    """
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for path in files:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.relative_to(folder)} {size} ".encode() + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def open_raw(raw_dir: Path) -> RawDays:
    """Find the raw data in a folder or one below it.

    The result is the first of these forms of which any file exists: the published multi-hot set; days as parquet,
    ``day=2015-02-15`` to ``day=2015-03-10``; days as text, ``day_0`` to ``day_23``, also ``.gz``.

    Raises:
        DataError: there is none of them, or files are missing.
    """
    folder, days = raw_dir, []
    if (found := find_file(raw_dir, "day_*_sparse_multi_hot.npz")) is not None:
        form, folder = MULTI_HOT, found.parent
        days = [tuple(folder / name for name in multi_hot_names(day)) for day in range(DAYS)]
    elif (found := find_file(raw_dir, "day=2015-*/*")) is not None:
        form, folder = PARQUET, found.parent.parent
        days = [parts_of(folder / name) or (folder / name / "part-00000",) for name in DAY_FOLDERS]
    else:
        found = find_file(raw_dir, *(f"day_{day}{end}" for day in range(DAYS) for end in ("", ".gz")))
        form, folder = TEXT, raw_dir if found is None else found.parent
        days = [(_text(folder, day),) for day in range(DAYS)]
    marker = synthetic.description_of(raw_dir, *filter(None, (found,)))
    if missing := [path for day in days for path in day if not path.is_file()]:
        lacking = [path.parent.name if form == PARQUET else path.name for path in missing]
        first, last = (DAY_FOLDERS[0], DAY_FOLDERS[-1]) if form == PARQUET else ("day_0", f"day_{DAYS - 1}")
        if len(missing) == sum(map(len, days)) and (raw_dir / "train_data.bin").is_file():
            raise DataError(
                f"{raw_dir} holds prepared files and no raw days; 'prepare --adopt' takes over DLRM-DCNv2's"
            )
        raise DataError(
            f"{folder} lacks {', '.join(lacking)}; all {DAYS} days of Criteo's click logs are needed, {first} to "
            f"{last}: 'mlperf-suite download' fetches them"
        )
    return RawDays(folder, form, tuple(days), marker)


def _text(raw_dir: Path, day: int) -> Path:
    compressed = raw_dir / f"day_{day}.gz"
    return compressed if compressed.is_file() else raw_dir / f"day_{day}"
