"""The raw folder: the days of the log as text, or the published data set that is multi-hot already."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.data import stand_in
from common.data.raw_layout import find_file
from common.errors import DataError
from common.recommendation.criteo.sample_rows import DAYS

_ENDS = 1 << 16  # bytes of each end of a file that its fingerprint has

PUBLISHED_ROWS = (
    *(195_841_983, 199_563_535, 196_792_019, 181_115_208, 152_115_810, 172_548_507, 204_846_845, 200_801_003),
    *(193_772_492, 198_424_372, 185_778_055, 153_588_700, 169_003_364, 194_216_520, 194_081_279, 187_154_596),
    *(177_984_934, 163_382_602, 142_061_091, 156_534_237, 193_627_464, 192_215_183, 189_747_893, 178_274_637),
)
"""Samples of each published day."""


def multi_hot_names(day: int) -> tuple[str, str, str]:
    """The files of a day of the published multi-hot set: labels, dense features, ids."""
    return f"day_{day}_labels.npy", f"day_{day}_dense.npy", f"day_{day}_sparse_multi_hot.npz"


@dataclass(frozen=True)
class RawDays:
    """A raw folder.

    Attributes:
        folder: where it is.
        multi_hot: whether it is the published set, with files of :func:`multi_hot_names`.
        files: of every day, in the order of the days; one of text, or three.
        stand_in: what describes generated data; None for real ones.
    """

    folder: Path
    multi_hot: bool
    files: tuple[tuple[Path, ...], ...]
    stand_in: dict[str, Any] | None

    def fingerprint(self) -> str:
        """SHA-256 over names, sizes and ends of all files; reads 128 KiB of each."""
        digest = hashlib.sha256(json.dumps(self.stand_in, sort_keys=True).encode())
        for path in (path for day in self.files for path in day):
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size} ".encode() + file.read(_ENDS))
                file.seek(max(0, size - _ENDS))
                digest.update(file.read(_ENDS))
        return digest.hexdigest()

    def check_rows(self, day: int, rows: int) -> None:
        """Refuse a real day that is not whole.

        Raises:
            DataError: it has other than the published number of samples.
        """
        if self.stand_in is None and rows != PUBLISHED_ROWS[day]:
            names = ", ".join(path.name for path in self.files[day])
            raise DataError(
                f"{self.folder}: {names} has {rows:,} samples and not {PUBLISHED_ROWS[day]:,}; fetch it again"
            )


def open_raw(raw_dir: Path) -> RawDays:
    """See what a raw folder, or one below it, holds: ``day_0`` … ``day_23``, also ``.gz``, or the multi-hot set.

    Raises:
        DataError: there is neither, or files are missing.
    """
    found = find_file(raw_dir, "day_*_sparse_multi_hot.npz", "day_0", "day_0.gz")
    marker = stand_in.description_of(raw_dir, *filter(None, (found,)))
    raw_dir = raw_dir if found is None else found.parent
    multi_hot = any(raw_dir.glob("day_*_sparse_multi_hot.npz"))
    files, missing = [], []
    for day in range(DAYS):
        paths = [raw_dir / name for name in multi_hot_names(day)] if multi_hot else [_text(raw_dir, day)]
        missing += [path.name for path in paths if not path.is_file()]
        files.append(tuple(paths))
    if missing:
        raise DataError(
            f"{raw_dir} lacks {', '.join(missing)}; all {DAYS} days of Criteo's click logs are needed, day_0 to "
            f"day_{DAYS - 1}: 'mlperf-suite download' says where they are"
        )
    return RawDays(raw_dir, multi_hot, tuple(files), marker)


def _text(raw_dir: Path, day: int) -> Path:
    compressed = raw_dir / f"day_{day}.gz"
    return compressed if compressed.is_file() else raw_dir / f"day_{day}"
