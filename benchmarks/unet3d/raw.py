"""KiTS19's raw layout: ``case_00000/imaging.nii.gz`` and ``case_00000/segmentation.nii.gz``, one folder per patient.

Cases from 210 on have no public labels and are ignored. The benchmark has a fixed list of evaluation cases.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.data.raw_layout import find_file
from common.data.synthetic import MARKER, description_of, marker_of
from common.errors import ConfigError, DataError

IMAGE = "imaging.nii.gz"
LABEL = "segmentation.nii.gz"
LABELLED_CASES = 210
EVALUATION_CASES = (
    0, 3, 5, 6, 12, 24, 34, 41, 44, 49, 52, 56, 61, 65, 66, 70, 76, 78, 80, 84, 86,
    87, 92, 111, 112, 125, 128, 138, 157, 160, 161, 162, 169, 171, 176, 185, 187, 189, 198, 203, 206, 207,
)  # fmt: skip
"""The 42 cases that are never used for training (mlcommons/training, unet3d, evaluation_cases.txt)."""


@dataclass(frozen=True)
class ScanSettings:
    """Settings of a preparation; the default is the benchmark's.

    Attributes:
        patch: shape (D, H, W) of crops and windows; smaller volumes are padded to it.
    """

    patch: tuple[int, int, int] = (128, 128, 128)

    def __post_init__(self) -> None:
        if len(self.patch) != 3 or not all(isinstance(axis, int) and 1 <= axis <= 1024 for axis in self.patch):
            raise ConfigError(f"patch={self.patch}: must be three axes of 1 to 1024 voxels")


@dataclass(frozen=True)
class RawCase:
    """The two files of a case, and its split."""

    name: str
    image: Path
    label: Path
    split: Literal["train", "eval"]


@dataclass(frozen=True)
class RawScans:
    """All cases, sorted by name; ``synthetic`` is the description of synthetic data, None for KiTS19."""

    cases: list[RawCase]
    synthetic: dict[str, Any] | None
    settings: ScanSettings

    def fingerprint(self) -> str:
        """Return a SHA-256 over names and sizes of the cases; the folder's path has no influence."""
        digest = hashlib.sha256()
        for case in self.cases:
            digest.update(f"{case.name}\t{case.image.stat().st_size}\t{case.label.stat().st_size}\n".encode())
        return digest.hexdigest()


def case_name(number: int) -> str:
    """Return ``case_00007`` for 7."""
    return f"case_{number:05d}"


def split_of(number: int) -> Literal["train", "eval"]:
    """Return the split that the benchmark assigns to a case."""
    return "eval" if number in EVALUATION_CASES else "train"


def data_folder(raw_dir: Path) -> Path:
    """Return the folder of the cases: a subfolder such as ``kits19/data``, or ``raw_dir``, also without cases."""
    found = find_file(raw_dir, f"case_{'[0-9]' * 5}/*.nii.gz")
    return raw_dir if found is None else found.parent.parent


def open_raw(raw_dir: Path) -> RawScans:
    """Find the cases in ``raw_dir``.

    Raises:
        DataError: the folder or a file of a case is missing, real data have fewer than the 210 cases, synthetic data
            lack one of the splits, or ``SYNTHETIC`` is damaged.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; copy KiTS19 there or generate synthetic data")
    folder = data_folder(raw_dir)
    marker, synthetic = marker_of(raw_dir, folder / MARKER), description_of(raw_dir, folder / MARKER)
    numbers = _numbers(folder)
    if not numbers:
        raise DataError(f"{raw_dir} has no folders case_00000 …; 'mlperf-suite download benchmark=unet3d' fetches them")
    if synthetic is None:
        numbers = list(range(LABELLED_CASES))
    cases = [
        RawCase(name, folder / name / IMAGE, folder / name / LABEL, split_of(number))
        for number in numbers
        for name in [case_name(number)]
    ]
    missing = [path for case in cases for path in (case.image, case.label) if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = (
            "generate the synthetic data again"
            if synthetic is not None
            else f"'mlperf-suite download benchmark=unet3d' fetches the {LABELLED_CASES} cases; with other scans, "
            f'write a file {MARKER} with {{"settings": {{"patch": [128, 128, 128]}}}}'
        )
        raise DataError(f"{missing[0]} is missing{more}; {hint}")
    for split in ("train", "eval"):
        if not any(case.split == split for case in cases):
            raise DataError(f"{raw_dir} has no case for {split}")
    return RawScans(cases, synthetic, _settings(marker, synthetic))


def _numbers(folder: Path) -> list[int]:
    names = (path.name for path in folder.glob("case_*") if re.fullmatch(r"case_\d{5}", path.name))
    return sorted(number for name in names if (number := int(name[-5:])) < LABELLED_CASES)


def _settings(marker: Path | None, synthetic: dict[str, Any] | None) -> ScanSettings:
    if synthetic is None:
        return ScanSettings()
    try:
        return ScanSettings(tuple(synthetic["settings"]["patch"]))
    except (KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{marker} has missing or invalid settings: {error}") from error
