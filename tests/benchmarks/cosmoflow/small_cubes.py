"""Small samples on disk: cubes of 4^3 voxels whose targets name them, in every format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.cosmoflow.prepare import adopt
from benchmarks.cosmoflow.samples import encode
from common.data.synthetic import mark
from common.formats.tfrecord import deflate

SIZE = 4
COUNTS = {"train": 8, "validation": 5}


def cube(number: int, size: int = SIZE) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Return a random cube and targets that begin with ``number``."""
    x = np.random.default_rng(number).integers(-(2**15), 2**15, (size, size, size, 4), np.int16)
    return x, np.array([number, 0.25, -0.5, 1e-3], np.float32)


def write_sample(folder: Path, kind: str, name: str, x: NDArray[np.int16], y: NDArray[np.float32]) -> None:
    """Write a sample as ``plain`` or ``gzip`` TFRecord, or as a pair of ``npy`` files."""
    if kind == "npy":
        np.save(folder / f"{name}_data.npy", x)
        np.save(folder / f"{name}_label.npy", y)
    else:
        content = encode(x, y)
        (folder / f"{name}.tfrecord").write_bytes(content if kind == "plain" else deflate(content))


def write_samples(root: Path, kind: str, size: int = SIZE) -> Path:
    """Write :data:`COUNTS` samples with numbers from 0 on, and from 100 on in the validation set."""
    for folder, count in COUNTS.items():
        (root / folder).mkdir(parents=True)
        for number in range(count):
            write_sample(root / folder, kind, f"s{number}", *cube(number + 100 * (folder == "validation"), size))
    mark(root, {"kind": "test"})
    return root


def prepared(root: Path, kind: str) -> Path:
    """Return a folder of prepared samples."""
    adopt(write_samples(root, kind), root)
    return root
