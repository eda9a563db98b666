"""Folder of prepared volumes: its cases with their splits and shapes, and their voxels.

``case_00000_x.npy`` is an image, float32 (1, D, H, W); ``case_00000_y.npy`` has its labels, uint8 of the same shape:
0 for background, 1 for kidney, 2 for tumour. ``cases.json`` lists the cases, ``manifest.json`` the files.

Axes: D H W as in the scan's array, in voxels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from common.data import manifest
from common.errors import DataError
from common.formats import npy
from common.untrusted.strict_json import read_json_object

FORMAT = "kits19-npy/1"
PREPARE_COMMAND = "mlperf-suite prepare benchmark=unet3d --raw-dir RAW --data-dir DATA"
CASES = "cases.json"


@dataclass(frozen=True)
class VolumeEntry:
    """A volume: name such as ``case_00000``, shape (D, H, W) in voxels, and split."""

    name: str
    shape: tuple[int, int, int]
    split: Literal["train", "eval"]

    @property
    def voxels(self) -> int:
        """Return the number of voxels."""
        depth, height, width = self.shape
        return depth * height * width

    @property
    def image_file(self) -> str:
        """Return the name of the image's file."""
        return f"{self.name}_x.npy"

    @property
    def label_file(self) -> str:
        """Return the name of the labels' file."""
        return f"{self.name}_y.npy"

    @property
    def file_bytes(self) -> dict[str, int]:
        """Return the sizes in bytes of the two files by name."""
        return {self.image_file: npy.HEADER_BYTES + 4 * self.voxels, self.label_file: npy.HEADER_BYTES + self.voxels}


@dataclass(frozen=True)
class Volumes:
    """The cases of a prepared folder, sorted by name; ``synthetic`` is true for synthetic data."""

    root: Path
    train: tuple[VolumeEntry, ...]
    eval: tuple[VolumeEntry, ...]
    synthetic: bool

    def read(self, case: VolumeEntry) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Read image (D, H, W) float32 and labels (D, H, W) uint8 of ``case`` into memory; both are contiguous.

        Raises:
            DataError: a file is missing or truncated, or its dtype or shape does not match ``cases.json``.
        """
        image: NDArray[np.float32] = _load(self.root / case.image_file, np.dtype(np.float32), case)
        label: NDArray[np.uint8] = _load(self.root / case.label_file, np.dtype(np.uint8), case)
        return image, label


def open_volumes(root: Path, patch: tuple[int, int, int]) -> Volumes:
    """Open a prepared folder, and check that all files exist and have the sizes that follow from the shapes.

    Args:
        root: folder of the prepared data.
        patch: shape (D, H, W) of crops and windows, the minimum shape of volumes.

    Raises:
        DataError: the folder is not completely prepared, a file is missing or has another size, there is no case for
            training or evaluation, or a volume is smaller than ``patch``.
    """
    described = manifest.read(root, FORMAT, PREPARE_COMMAND)
    cases = read_cases(root)
    for case in cases:
        for name, size in case.file_bytes.items():
            if name not in described.files:
                raise DataError(f"{root / manifest.NAME} lacks {name} of {case.name}; run '{PREPARE_COMMAND}'")
            if (found := described.files[name].bytes) != size:
                raise DataError(
                    f"{root / name} has {found} bytes, but a volume of {_x(case.shape)} voxels takes {size}; "
                    f"run '{PREPARE_COMMAND}'"
                )
        if any(axis < least for axis, least in zip(case.shape, patch, strict=True)):
            raise DataError(
                f"{root}: {case.name} has {_x(case.shape)} voxels, too few for crops of {_x(patch)}; prepare the data "
                "for these crops, or use smaller ones"
            )
    splits = {name: tuple(case for case in cases if case.split == name) for name in ("train", "eval")}
    for name, members in splits.items():
        if not members:
            raise DataError(f"{root} has no case for {name}; run '{PREPARE_COMMAND}'")
    return Volumes(root, splits["train"], splits["eval"], described.synthetic)


def read_cases(root: Path) -> list[VolumeEntry]:
    """Return the cases in ``cases.json`` of a prepared folder, sorted by name.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = root / CASES
    try:
        if not path.exists():
            raise DataError(f"{path} is missing; run '{PREPARE_COMMAND}'")
        content = read_json_object(path, remedy=f"delete {root} and run '{PREPARE_COMMAND}'")
        return sorted((_parse(name, entry) for name, entry in content.items()), key=lambda case: case.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is damaged ({problem}); delete {root} and run '{PREPARE_COMMAND}'") from error


def _parse(name: str, entry: dict[str, Any]) -> VolumeEntry:
    depth, height, width = (int(axis) for axis in entry["shape"])
    if entry["split"] not in ("train", "eval"):
        raise ValueError(f"{name} has the split {entry['split']!r}")
    return VolumeEntry(name, (depth, height, width), entry["split"])


def _load(path: Path, dtype: np.dtype[Any], case: VolumeEntry) -> NDArray[Any]:
    remedy = f"run 'mlperf-suite verify benchmark=unet3d --data-dir {path.parent}'"
    try:
        array = npy.load(path, dtype, (1, *case.shape))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); {remedy}") from error
    if array.dtype != dtype or array.shape != (1, *case.shape) or not array.flags.c_contiguous:
        raise DataError(
            f"{path}: {array.dtype} of shape {array.shape}, but {CASES} gives {dtype} of (1, "
            f"{', '.join(map(str, case.shape))}), the last axis contiguous; {remedy}"
        )
    volume: NDArray[Any] = array[0]
    return volume


def _x(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
