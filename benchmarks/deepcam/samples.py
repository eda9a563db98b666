"""Folder of prepared samples: images of climate variables with a class for every pixel, and their statistics.

``train`` and ``validation`` have one sample per image, in one of NVIDIA's two formats:

- a pair ``data-NAME.npy``, float32 (H, W, C), and ``label-NAME.npy``, (H, W), of any type of numbers;
- or ``datalabel-NAME.npy``, float32 (H, W, C + 1), which has the label as last channel.

``samples.lst`` in each folder has a line ``<name> <CRC-32>`` for each sample: its first file, and the checksum over
all its files, in hexadecimal digits. ``stats.h5`` above them has the range of every variable in the training set.

Axes: H, W pixels; C variables.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data import manifest
from common.data.aligned_buffers import ALIGNMENT, AlignedBuffer, AlignedBuffers
from common.data.direct_reader import DirectFile, Mode
from common.data.manifest import Manifest
from common.errors import DataError
from common.formats import npy
from common.untrusted.regular_file import open_regular, read_text

FORMAT = "deepcam-images/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=deepcam --raw-dir RAW --data-dir DATA"
LIST, STATISTICS = "samples.lst", "stats.h5"
CHANNELS = 16
"""Climate variables of a pixel."""
CLASSES = 3
"""Classes of a pixel: background, tropical cyclone, atmospheric river."""
SPLITS = {"train": "train", "eval": "validation"}
"""Prefix of the manifest's count to the folder."""
DATA, LABEL, FUSED = "data-", "label-", "datalabel-"
"""Prefixes of the names of files."""
REMEDY = "fetch or prepare it again"
Size = tuple[int, int]
"""Height and width of an image in pixels."""
_LINE = re.compile(r"([^/\s]+) ([0-9a-f]{8})")


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of the sample whose first file is ``path``: the fused one, or data and label."""
    if path.name.startswith(FUSED):
        return (path,)
    return path, path.with_name(LABEL + path.name.removeprefix(DATA))


def lengths_of(path: Path) -> list[int]:
    """Return the sizes in bytes of the files of the sample whose first file is ``path``.

    Raises:
        DataError: a file is missing.
    """
    try:
        return [each.stat().st_size for each in files_of(path)]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}; {REMEDY}") from error


def write_classes(stored_HW: NDArray[Any], y_HW: NDArray[np.uint8]) -> None:
    """Write labels of any type of numbers to ``y_HW``.

    Raises:
        ValueError: a label is no class, or the labels have another shape or are no numbers.
    """
    if stored_HW.shape != y_HW.shape or stored_HW.dtype.kind not in "iuf":
        raise ValueError(f"labels are {stored_HW.dtype} of shape {stored_HW.shape}, not numbers of {y_HW.shape}")
    with np.errstate(invalid="ignore"):  # NaN, which differs from every class
        y_HW[:] = stored_HW
    wrong_HW = (y_HW != stored_HW) | (y_HW >= CLASSES)
    if wrong_HW.any():
        raise ValueError(f"a label is {stored_HW[wrong_HW][0]}; classes are 0 to {CLASSES - 1}")


class SampleReader:
    """Reads the samples in the folder of a split; several threads may read.

    Args:
        size: required size of the images.
        reads: whether to read files past the page cache.
    """

    def __init__(self, folder: Path, size: Size, reads: Mode) -> None:
        self.folder, self.size = folder, size
        self._reads: Mode = reads
        largest = npy.HEADER_BYTES + 4 * (CHANNELS + 1) * size[0] * size[1]
        self._capacity = -(-largest // ALIGNMENT) * ALIGNMENT
        self._buffers = threading.local()

    def read(self, name: str, x_HWC: Tensor, y_HW: Tensor) -> None:
        """Write the sample whose first file is ``name`` to ``x_HWC``, float32, as stored, and to ``y_HW``, uint8.

        Raises:
            DataError: a file is missing or damaged, the image has another size, or a label is no class.
        """
        files = files_of(self.folder / name)
        fused, path = len(files) == 1, files[0]
        shape = (*self.size, CHANNELS + fused)
        try:
            data_HWC = self._array(path)
            if data_HWC.dtype != np.float32 or data_HWC.shape != shape:
                raise ValueError(f"{data_HWC.dtype} of shape {data_HWC.shape}; images have float32 of {shape}")
            x_HWC.numpy()[:] = data_HWC[..., :CHANNELS]
            path = files[-1]
            write_classes(data_HWC[..., CHANNELS] if fused else self._array(path), y_HW.numpy())
        except ValueError as error:
            raise DataError(f"{path}: {error}; {REMEDY}") from error

    def _array(self, path: Path) -> NDArray[Any]:
        """Return the array in a file, as a view of this thread's buffer. Raises :class:`ValueError` if it is none."""
        if not hasattr(self._buffers, "own"):
            self._buffers.own = AlignedBuffers(1, self._capacity, pin_memory=False)[0]
        buffer: AlignedBuffer = self._buffers.own
        with DirectFile(path, mode=self._reads) as file:
            if file.size > buffer.size:
                raise ValueError(f"it has {file.size:,} bytes, more than an image of {self.size} pixels")
            return npy.viewed(file.read(0, file.size, buffer).numpy().data)


def read_list(path: Path) -> dict[str, int]:
    """Return the names of a split's samples, and the CRC-32 of each.

    Raises:
        DataError: the list is missing, or a line is not ``<name> <CRC-32>`` of a further sample.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(read_text(path, remedy=f"run '{PREPARE_COMMAND}'").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[1] in found:
            raise DataError(
                f"{path}: line {number} is {line[:100]!r}, no new name with CRC-32; run '{PREPARE_COMMAND}'"
            )
        found[match[1]] = int(match[2], 16)
    return found


def read_range(path: Path) -> tuple[Tensor, Tensor]:
    """Return ``shift_C`` and ``scale_C``, float32: ``scale * (x - shift)`` is in [0, 1] over the training set.

    They are ``minval`` and ``1 / (maxval - minval)``. (Source: mlcommons/hpc, deepcam, cam_hdf5_dataset.py.)

    Args:
        path: a ``stats.h5``, which has both in the group ``climate``.

    Raises:
        DataError: the file is missing or damaged, has other channels, or a channel has no range.
    """
    if not path.exists():
        raise DataError(f"{path} is missing: it has the range of every channel; fetch it with the images")
    try:
        with open_regular(path) as opened, h5py.File(opened, "r") as file:
            low_C, high_C = (_of_channels(file["climate"], name) for name in ("minval", "maxval"))
        with np.errstate(invalid="ignore"):
            empty_C = ~(np.isfinite(high_C - low_C) & (high_C > low_C))
        if empty_C.any():
            channel = int(empty_C.argmax())
            raise ValueError(f"channel {channel} has the range [{low_C[channel]}, {high_C[channel]}]")
    except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{path} has no range of {CHANNELS} channels: {error}; fetch it again") from error
    return torch.from_numpy(low_C).float(), torch.from_numpy(1 / (high_C - low_C)).float()


def _of_channels(group: h5py.Group, name: str) -> NDArray[np.float64]:
    values = group[name]
    if values.shape != (CHANNELS,):
        raise ValueError(f"climate/{name} has the shape {values.shape}, not ({CHANNELS},)")
    return np.asarray(values, np.float64)


def read_manifest(root: Path, size: Size) -> Manifest:
    """Return the manifest of ``root``.

    Args:
        size: required size of the images.

    Raises:
        DataError: the manifest is missing, malformed or of another format, or the images have another size.
    """
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, ("train_samples", "eval_samples", "height", "width"))
    height, width = found.counts["height"], found.counts["width"]
    if (height, width) != size:
        raise DataError(
            f"{root} has images of {height} x {width} pixels where benchmark.facts.image_size=[{size[0]},{size[1]}]: "
            "these are data of another recipe"
        )
    return found
