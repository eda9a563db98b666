"""A raw folder of a few tiny scans in KiTS19's layout, written with nibabel."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel
import numpy as np

CASES = {
    "case_00000": ((20, 30, 28), (2.5, 0.8, 0.8)),  # evaluation, by the benchmark's list
    "case_00001": ((40, 24, 26), (1.0, 1.5, 1.5)),
    "case_00002": ((22, 22, 22), (1.6, 1.2, 1.2)),
    "case_00003": ((16, 25, 31), (3.0, 0.9, 0.9)),  # evaluation
}
PATCH = (24, 20, 20)


def write_nifti(path: Path, array: np.ndarray, spacing: tuple[float, ...]) -> None:
    """Write a file with ``spacing`` in ``pixdim[1:4]`` of its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.diag([*spacing[:3], 1.0])), path)


def write_case(folder: Path, shape: tuple[int, ...], spacing: tuple[float, ...], seed: int = 0) -> None:
    """Write random 16-bit intensities and random labels."""
    random = np.random.default_rng(seed)
    write_nifti(folder / "imaging.nii.gz", random.integers(-300, 500, shape).astype(np.int16), spacing)
    write_nifti(folder / "segmentation.nii.gz", random.integers(0, 3, shape).astype(np.uint8), spacing)


def write_raw(raw_dir: Path) -> Path:
    """Write all ``CASES``, marked as synthetic data for crops of ``PATCH``."""
    for seed, (name, (shape, spacing)) in enumerate(CASES.items()):
        write_case(raw_dir / name, shape, spacing, seed)
    mark(raw_dir, PATCH)
    return raw_dir


def mark(raw_dir: Path, patch: tuple[int, ...]) -> None:
    """Write ``SYNTHETIC``."""
    (raw_dir / "SYNTHETIC").write_text(json.dumps({"kind": "a test", "settings": {"patch": patch}}))
