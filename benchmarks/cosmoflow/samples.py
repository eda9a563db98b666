"""Folder of prepared samples: cubes of particle counts, and the cosmological parameters of their universes.

``train`` and ``validation`` have one sample per file, and a list ``files_data.lst`` with a line ``<name> <bytes>`` for
each file, as in NVIDIA's submissions. A sample is

- ``NAME.tfrecord``, with one ``tf.train.Example``: ``x``, the bytes of an int16 array (D, H, W, 4) in C order, and
  ``y``, 4 float32 values. A file without gzip may have an index, ``NAME.tfrecord.idx``;
- or a pair ``NAME_data.npy`` (int16) and ``NAME_label.npy`` (float32).

Axes: D, H, W in voxels; C redshifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data import manifest
from common.data.direct_reader import FileReader, Mode
from common.data.manifest import Manifest
from common.errors import DataError
from common.formats import npy, tfrecord
from common.untrusted.regular_file import read_bytes, read_text

FORMAT = "cosmoflow-samples/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=cosmoflow --raw-dir RAW --data-dir DATA"
LIST = "files_data.lst"
REDSHIFTS = 4
"""Snapshots of a universe: the channels of a cube."""
PARAMETERS = 4
"""Parameters of a universe, normalised to about [-1, 1]: the targets."""
SPLITS = {"train": "train", "eval": "validation"}
"""Prefix of the manifest's count to the folder."""
RECORD_SUFFIX, CUBE_SUFFIX, LABEL_SUFFIX = ".tfrecord", "_data.npy", "_label.npy"
RECORD_BYTES = 2**26
"""Largest TFRecord in bytes. That of a cube of 128^3 voxels has 16,777,287."""
REMEDY = "fetch or prepare it again"


def cube_bytes(size: int) -> int:
    """Return the bytes of the cube of ``size`` x ``size`` x ``size`` voxels at all redshifts."""
    return 2 * REDSHIFTS * size**3


def edge_of(length: int) -> int:
    """Return the edge in voxels of a cube of ``length`` bytes.

    Raises:
        ValueError: no cube has so many bytes.
    """
    edge = round((length / cube_bytes(1)) ** (1 / 3))
    if length < 1 or cube_bytes(edge) != length:
        raise ValueError(f"{length:,} bytes are no cube of int16 values at {REDSHIFTS} redshifts")
    return edge


def encode(x_DHWC: NDArray[np.int16], y: NDArray[np.float32]) -> bytes:
    """Return the content of a TFRecord file with one sample: 16,777,287 bytes for 128^3 voxels."""
    return tfrecord.frame(tfrecord.pack_example({"x": x_DHWC.astype("<i2").tobytes(), "y": y}))


def decode_record(data: memoryview, checksums: bool) -> tuple[memoryview, NDArray[np.float32]]:
    """Return the bytes of the cube and the parameters in the content of a TFRecord file that is not compressed.

    Raises:
        Malformed: the file is damaged, or does not have one sample.
    """
    found = list(tfrecord.records(data, checksums))
    if len(found) != 1:
        raise tfrecord.Malformed(f"it has {len(found)} records, and a file of a sample has one")
    features = tfrecord.unpack_example(found[0][1])
    x, y = features.get("x"), features.get("y")
    if not isinstance(x, memoryview) or not isinstance(y, np.ndarray) or y.shape != (PARAMETERS,):
        raise tfrecord.Malformed(
            f"its Example is no sample, with bytes x and {PARAMETERS} values y: it has {[*features]}"
        )
    return x, y


def label_of(cube: str) -> str:
    """Return the name of the parameters that belong to ``NAME_data.npy``."""
    return cube.removesuffix(CUBE_SUFFIX) + LABEL_SUFFIX


def decode_pair(path: Path, data: memoryview) -> tuple[memoryview, NDArray[np.float32]]:
    """Return the bytes of the cube and the parameters of ``NAME_data.npy``, with the content ``data``, and its label.

    Raises:
        ValueError: a file is missing or damaged, or has no cube or no parameters.
    """
    cube, label = npy.viewed(data), path.with_name(label_of(path.name))
    if cube.dtype != np.int16 or cube.shape != (*cube.shape[:1] * 3, REDSHIFTS) or not cube.flags.c_contiguous:
        raise ValueError(f"{cube.dtype} of shape {cube.shape}, not a cube of int16 in C order at {REDSHIFTS} redshifts")
    try:
        y: NDArray[np.float32] = npy.load(label, np.dtype(np.float32), (PARAMETERS,))
    except OSError as error:
        raise ValueError(f"{label.name} cannot be read: {error.strerror}") from error
    if y.dtype != np.float32 or y.shape != (PARAMETERS,):
        raise ValueError(f"{label.name} is {y.dtype} of shape {y.shape}, not float32 of ({PARAMETERS},)")
    return data[-cube.nbytes :], y


def decode(path: Path, data: memoryview, checksums: bool) -> tuple[memoryview, NDArray[np.float32]]:
    """Return the bytes of the cube and the parameters of a sample.

    Args:
        path: file of the sample; of a pair, that of the cube.
        data: content of the file.
        checksums: whether to compute the CRC-32C of a TFRecord. A gzip stream always has its own checksum.

    Raises:
        ValueError: the file is damaged, or has no sample.
    """
    if path.name.endswith(CUBE_SUFFIX):
        return decode_pair(path, data)
    if data[: len(tfrecord.GZIP_MAGIC)] == tfrecord.GZIP_MAGIC:
        data = memoryview(tfrecord.inflate(data, RECORD_BYTES))
    return decode_record(data, checksums)


def edge_of_file(path: Path) -> int:
    """Return the edge in voxels of the cube in a sample's file.

    Raises:
        DataError: the file is missing or damaged, or has no sample.
    """
    try:
        x, _ = decode(path, memoryview(read_bytes(path, RECORD_BYTES)), checksums=True)
        return edge_of(len(x))
    except ValueError as error:
        raise DataError(f"{path}: {error}; {REMEDY}") from error


class Split:
    """The samples of one split, by index; several threads may read.

    Args:
        path: folder of the split.
        files: name and bytes of each sample; None for a size that is not known.
        size: edge of the cubes in voxels.
        reads: whether to read files past the page cache.
        checksums: whether to compute the CRC-32C of a TFRecord (:func:`decode`).
    """

    def __init__(
        self, path: Path, files: Sequence[tuple[str, int | None]], size: int, reads: Mode, checksums: bool
    ) -> None:
        self.path, self.files, self.size = path, files, size
        self._reader, self._checksums = FileReader(reads), checksums

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, x_DHWC: Tensor, y: Tensor) -> None:
        """Write a sample to ``x_DHWC``, int16 (D, H, W, 4), contiguous, and ``y``, float32 (4,).

        Raises:
            DataError: a file is missing, damaged or of another size, or its cube has another size.
        """
        name, expected_bytes = self.files[index]
        path = self.path / name
        data = self._reader.read(path, expected_bytes)
        try:
            x, parameters = decode(path, data, self._checksums)
            if len(x) != cube_bytes(self.size):
                raise ValueError(
                    f"a cube of {len(x):,} bytes; cubes of {self.size}^3 voxels at {REDSHIFTS} redshifts have "
                    f"{cube_bytes(self.size):,}"
                )
            if not np.isfinite(parameters).all():
                raise ValueError(f"the parameters {parameters.tolist()} are not finite")
        except ValueError as error:
            raise DataError(f"{path}: {error}; {REMEDY}") from error
        x_DHWC.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(x, np.uint8)
        y.numpy()[:] = parameters


def read_list(path: Path) -> list[tuple[str, int]]:
    """Return the names of a split's samples, and the size in bytes of each.

    Raises:
        DataError: the list is missing, or a line is not ``<name> <bytes>``.
    """
    files = []
    for number, line in enumerate(read_text(path, remedy=f"run '{PREPARE_COMMAND}'").splitlines(), 1):
        name, _, size = line.rpartition(" ")
        if not name or "/" in name or not (size.isascii() and size.isdigit()):
            raise DataError(f"{path}: line {number} is {line[:100]!r}, not a name and a size; run '{PREPARE_COMMAND}'")
        files.append((name, int(size)))
    return files


def read_manifest(root: Path, size: int) -> Manifest:
    """Return the manifest of ``root``.

    Args:
        size: required edge of the cubes in voxels.

    Raises:
        DataError: the manifest is missing, malformed or of another format, or the cubes have another size.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, ("train_samples", "eval_samples", "size"))
    if found.counts["size"] != size:
        raise DataError(
            f"{root} has cubes of {found.counts['size']}^3 voxels where benchmark.facts.size={size}: these are data of "
            "another recipe"
        )
    return found
