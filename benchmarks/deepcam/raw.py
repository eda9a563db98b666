"""Raw data of DeepCAM: the published HDF5 files of CAM5 simulations.

The folder ``All-Hist`` has ``train/data-*.h5``, ``validation/data-*.h5`` and ``stats.h5``; other folders are ignored.
A file is a sample: ``climate/data``, float32 (H, W, C), and ``climate/labels_0``, (H, W), of any type of numbers.

Axes: H, W pixels; C variables.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from benchmarks.deepcam.samples import CHANNELS, SPLITS, STATISTICS, read_range, write_classes
from common.data.raw_layout import RawSplits, find_file
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats.raw_files import listed
from common.untrusted.regular_file import open_regular, read_bytes

PATTERN = "data-*.h5"
IMAGES, LABELS = "climate/data", "climate/labels_0"
"""Data sets of a file."""
MOST_PIXELS = 2**22
"""Largest image; one of the benchmark has 884,736 pixels."""


def read_sample(path: Path) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the image (H, W, C) and the labels (H, W) of a file.

    Raises:
        DataError: the file is truncated or damaged, or has other data; a value is not finite; or a label is no class.
    """
    try:
        with open_regular(path) as opened, h5py.File(opened, "r") as file:
            images, labels = file[IMAGES], file[LABELS]
            known = images.dtype == np.float32 and labels.ndim == 2 and images.shape == (*labels.shape, CHANNELS)
            if not known or labels.size > MOST_PIXELS:
                raise ValueError(
                    f"{IMAGES} is {images.dtype} of shape {images.shape}, {LABELS} has the shape {labels.shape}; "
                    f"expected are float32 of (H, W, {CHANNELS}) and (H, W), with at most {MOST_PIXELS:,} pixels"
                )
            y_HW = np.empty(labels.shape, np.uint8)
            write_classes(labels[()], y_HW)
            x_HWC: NDArray[np.float32] = images[()]
        if not np.isfinite(x_HWC).all():
            raise ValueError("a value is not finite")
    except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no readable sample: {error}; fetch the file again") from error
    return x_HWC, y_HW


def open_raw(raw_dir: Path) -> RawSplits:
    """Find the samples in ``raw_dir`` or a folder below it, and the content of ``stats.h5``.

    Raises:
        DataError: the folder or a split is missing, or ``stats.h5`` is missing or has other channels.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; put All-Hist there or generate synthetic data")
    first = find_file(raw_dir, f"train/{PATTERN}")
    if first is None:
        raise DataError(f"{raw_dir} has no samples: neither train/{PATTERN} nor All-Hist/train/{PATTERN}")
    root = first.parent.parent
    splits = {split: listed(root / folder, PATTERN) for split, folder in SPLITS.items()}
    if not splits["eval"]:
        raise DataError(f"{first} is there, but {root / SPLITS['eval']} has no {PATTERN}")
    return RawSplits(splits, description_of(raw_dir, first), read_statistics(root))


def read_statistics(root: Path) -> bytes:
    """Return the content of ``stats.h5`` in ``root``; raises like :func:`benchmarks.deepcam.samples.read_range`."""
    read_range(root / STATISTICS)
    return read_bytes(root / STATISTICS)
