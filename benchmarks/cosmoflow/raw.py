"""Raw data of CosmoFlow: the published TFRecords, packed or unpacked, or the HDF5 files of the simulations.

The layouts, each with one folder for training and one for evaluation (``train``, ``validation``); others are ignored:

- ``cosmoUniverse_2019_05_4parE_tf_v2.tar`` with gzipped TFRecords, which are read in place;
- ``train/*.tfrecord``, with or without gzip;
- ``train/**/*.hdf5``: a file is a universe with ``full``, int16 (4 E, 4 E, 4 E, 4), and ``unitPar``, its parameters. It
  is split into 4 x 4 x 4 cubes of E^3 voxels. Cube ``i`` counts along axis 2 first, and its name is
  ``<folder>_<file>_<i>``. (Source: mlcommons/hpc, cosmoflow, prepare.py.)

Axes: D, H, W in voxels; C redshifts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from benchmarks.cosmoflow.samples import (
    PARAMETERS,
    RECORD_BYTES,
    RECORD_SUFFIX,
    REDSHIFTS,
    SPLITS,
    decode_record,
    edge_of,
    encode,
)
from common.data.raw_layout import find_file, fingerprint_of
from common.data.synthetic import description_of
from common.errors import DataError
from common.formats import tfrecord
from common.formats.raw_files import is_data, listed
from common.untrusted.archives import tar_members
from common.untrusted.regular_file import open_regular

TAR = "cosmoUniverse_2019_05_4parE_tf_v2.tar"
UNIVERSE_SUFFIX = ".hdf5"
CUBES_PER_AXIS = 4
"""Cubes along each axis of a universe."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """A TFRecord of one sample, or a universe: ``size`` bytes at ``offset`` of ``path``.

    Attributes:
        name: name of the sample's file, or the start of the names of all cubes of the universe.
    """

    path: Path
    offset: int
    size: int
    name: str

    @property
    def universe(self) -> bool:
        """Whether the file is a universe."""
        return self.path.suffix == UNIVERSE_SUFFIX

    @property
    def names(self) -> list[str]:
        """Return the names of the TFRecords of all samples."""
        if not self.universe:
            return [self.name]
        return [f"{self.name}_{number:03d}{RECORD_SUFFIX}" for number in range(CUBES_PER_AXIS**3)]

    def samples(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield the name, the edge of the cube in voxels and the content of the TFRecord of every sample.

        Holds a quarter of a universe in memory.

        Raises:
            DataError: the file is truncated or damaged, or has other data.
        """
        if self.universe:
            yield from ((name, len(x), encode(x, y)) for name, (x, y) in zip(self.names, self._cubes(), strict=True))
            return
        try:
            content = self._content()
            if content.startswith(tfrecord.GZIP_MAGIC):
                content = tfrecord.inflate(memoryview(content), RECORD_BYTES)
            x, _ = decode_record(memoryview(content), checksums=True)
            yield self.name, edge_of(len(x)), content
        except ValueError as error:
            raise DataError(f"{self.path}: {self.name}: {error}; fetch the file again") from error

    def _content(self) -> bytes:
        if self.size > RECORD_BYTES:
            raise ValueError(f"{self.size:,} bytes are more than any sample has")
        with open_regular(self.path) as file:
            return os.pread(file.fileno(), self.size, self.offset)

    def _cubes(self) -> Iterator[tuple[NDArray[np.int16], NDArray[np.float32]]]:
        """Yield the cubes (D, H, W, C) of the universe, and its parameters."""
        try:
            with h5py.File(self.path, "r") as file:
                full, parameters = file["full"], np.asarray(file["unitPar"], np.float32)
                edge = full.shape[0] // CUBES_PER_AXIS
                if full.dtype != np.int16 or full.shape != (*[CUBES_PER_AXIS * edge] * 3, REDSHIFTS) or not edge:
                    raise ValueError(
                        f"full is {full.dtype} of shape {full.shape}, not int16 of three equal edges, divisible by "
                        f"{CUBES_PER_AXIS}, at {REDSHIFTS} redshifts"
                    )
                if parameters.shape != (PARAMETERS,):
                    raise ValueError(f"unitPar has the shape {parameters.shape}, not ({PARAMETERS},)")
                parts = [slice(part * edge, (part + 1) * edge) for part in range(CUBES_PER_AXIS)]
                for d in parts:
                    slab = full[d]
                    yield from ((slab[:, h, w], parameters) for h, w in product(parts, parts))
        except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{self.path} is no readable universe: {error}; fetch the file again") from error


@dataclass(frozen=True)
class RawData:
    """All files by split, sorted by name; ``synthetic`` is the description of synthetic data, None for real data."""

    splits: dict[str, list[RawFile]]
    synthetic: dict[str, Any] | None

    def fingerprint(self) -> str:
        """Return the SHA-256 over names and sizes, which depends neither on folders nor on the tar."""
        return fingerprint_of((split, file.name, file.size) for split, files in self.splits.items() for file in files)


def open_raw(raw_dir: Path) -> RawData:
    """Find the samples in ``raw_dir`` or a folder below it: in the tar if there is one, or else in folders.

    Raises:
        DataError: the folder or a split is missing, the tar is damaged, or two files have the same name.
    """
    if not raw_dir.is_dir():
        raise DataError(f"raw folder {raw_dir} does not exist; put {TAR} there or generate synthetic data")
    patterns = [f"train/{folders}*{suffix}" for suffix in (RECORD_SUFFIX, UNIVERSE_SUFFIX) for folders in ("", "*/")]
    tar = find_file(raw_dir, TAR)
    first = tar or find_file(raw_dir, *patterns)
    if first is None:
        raise DataError(
            f"{raw_dir} holds no samples: neither {TAR} nor train/*{RECORD_SUFFIX} nor train/*{UNIVERSE_SUFFIX}"
        )
    if tar is not None:
        splits = _in_tar(tar)
    else:
        root = next(folder for folder in first.parents if folder.name == "train").parent
        suffix = RECORD_SUFFIX if first.name.endswith(RECORD_SUFFIX) else UNIVERSE_SUFFIX
        splits = {split: _in_folder(root / folder, suffix) for split, folder in SPLITS.items()}
    for split, files in splits.items():
        if not files:
            raise DataError(f"{first} is there, but {raw_dir} has no samples in a folder {SPLITS[split]}")
        files.sort(key=lambda file: file.name)
        for one, other in pairwise(files):
            if one.name == other.name:
                raise DataError(f"{one.path} and {other.path} have samples of the same name {one.name}")
    return RawData(splits, description_of(raw_dir, first))


def _in_tar(path: Path) -> dict[str, list[RawFile]]:
    splits = {folder: split for split, folder in SPLITS.items()}
    found: dict[str, list[RawFile]] = {split: [] for split in SPLITS}
    with open_regular(path) as file:
        for _, member in tar_members(file, f"{path}: the tar is truncated or damaged", "r:"):
            name = PurePosixPath(member.name)
            split = splits.get(name.parent.name)
            if split is not None and member.isfile() and name.suffix == RECORD_SUFFIX and is_data(member.name):
                found[split].append(RawFile(path, member.offset_data, member.size, name.name))
    return found


def _in_folder(folder: Path, suffix: str) -> list[RawFile]:
    return [
        RawFile(
            path, 0, path.stat().st_size, f"{path.parent.name}_{path.stem}" if suffix == UNIVERSE_SUFFIX else path.name
        )
        for path in listed(folder, f"**/*{suffix}")
    ]
