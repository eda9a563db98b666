"""Small samples on disk: images of 4 x 6 pixels whose first value names them, in every format."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from benchmarks.deepcam.prepare import adopt
from common.data.synthetic import mark

SIZE = (4, 6)
COUNTS = {"train": 8, "validation": 5}
LOW = np.linspace(-3, 12, 16, dtype=np.float32)
HIGH = LOW + np.geomspace(0.5, 2**14, 16, dtype=np.float32)


def sample(number: int, size: tuple[int, int] = SIZE) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return a random image whose first value is ``number``, and random labels."""
    random = np.random.default_rng(number)
    x = random.standard_normal((*size, 16), np.float32)
    x[0, 0, 0] = number
    return x, random.integers(0, 3, size, np.uint8)


def write_sample(folder: Path, kind: str, name: str, x: NDArray[np.float32], y: NDArray[np.generic]) -> None:
    """Write a sample as ``hdf5``, as a ``pair`` of npy files or as one ``fused`` file."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "hdf5":
        with h5py.File(folder / f"data-{name}.h5", "w") as file:
            file["climate/data"], file["climate/labels_0"] = x, y
    elif kind == "pair":
        np.save(folder / f"data-{name}.npy", x)
        np.save(folder / f"label-{name}.npy", y)
    else:
        np.save(folder / f"datalabel-{name}.npy", np.concatenate([x, y[..., None]], -1, dtype=np.float32))


def write_statistics(root: Path, low: NDArray[np.float32] = LOW, high: NDArray[np.float32] = HIGH) -> None:
    """Write ``stats.h5``, also with values that are not read."""
    with h5py.File(root / "stats.h5", "w") as file:
        group = file.create_group("climate")
        group["minval"], group["maxval"], group["count"] = low, high, 8
        group["mean"], group["sqmean"] = low + 7, high * 5


def write_samples(root: Path, kind: str, label: type = np.float32) -> Path:
    """Write :data:`COUNTS` samples with numbers from 0 on, and from 100 on in the validation set, and statistics."""
    for folder, count in COUNTS.items():
        for number in range(count):
            x, y = sample(number + 100 * (folder == "validation"))
            write_sample(root / folder, kind, f"s{number}", x, y.astype(label))
    write_statistics(root)
    mark(root, {"kind": "test"})
    return root


def prepared(root: Path, kind: str = "pair", label: type = np.uint8) -> Path:
    """Return a folder of prepared samples."""
    adopt(write_samples(root, kind, label), root)
    return root
