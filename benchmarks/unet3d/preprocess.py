"""Preprocessing of a CT scan in NIfTI to a training volume: resampling to a fixed spacing, clipping, scaling, padding.

Steps and order are those of the reference (mlcommons/training, unet3d, preprocess_dataset.py). Axes D H W are those
of the scan's array, slices first, without reorientation. Spacing is in millimetres.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
import torch
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from common.errors import DataError
from common.untrusted.regular_file import open_file

TARGET_SPACING = (1.6, 1.2, 1.2)
CLIP = (-79.0, 304.0)
"""Range in Hounsfield units. Mean and deviation below are those of the foreground of KiTS19."""
MEAN = 101.0
DEVIATION = 76.9
CLASSES = 3
_MOST_VOXELS = 1 << 31
_EXTENSION_BYTES = 2**20
"""Largest accepted size of the extensions between header and values."""
_HEADER_BYTES = 348
_UNREADABLE = (OSError, EOFError, zlib.error, ValueError, ImageFileError, HeaderDataError, WrapStructError)


@dataclass(frozen=True)
class Scan:
    """A case: image (D, H, W) in Hounsfield units, float32; labels (D, H, W) uint8; spacing of the axes in mm."""

    image: NDArray[np.float32]
    label: NDArray[np.uint8]
    spacing: tuple[float, float, float]


def load_scan(image_path: Path, label_path: Path) -> Scan:
    """Read the two NIfTI files of a case.

    Raises:
        DataError: a file is missing, damaged or not a volume, the shapes differ, the spacing is invalid, an intensity
            is not finite, or a label is not 0, 1 or 2.
    """
    label_values, _ = _read(label_path)
    with np.errstate(invalid="ignore"):
        label = label_values.astype(np.uint8, order="C")
    if not (label.max() < CLASSES and np.array_equal(label, label_values)):
        invalid = np.setdiff1d(label_values, np.arange(CLASSES))
        raise DataError(f"{label_path}: label {invalid[0]:g}, expected 0 (background), 1 (kidney) or 2 (tumour)")
    label_shape = label_values.shape
    del label_values  # a scan of 1,059 slices takes 2 GB in float64
    image_values, spacing = _read(image_path)
    if image_values.shape != label_shape:
        raise DataError(f"{image_path} has the shape {image_values.shape} and its labels {label_shape}")
    image = image_values.astype(np.float32, order="C")
    if not np.isfinite(image).all():
        raise DataError(f"{image_path} has intensities that are not finite; fetch it again")
    return Scan(image, label, spacing)


def preprocess(scan: Scan, patch: tuple[int, int, int]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Resample, clip, scale and pad ``scan``.

    Args:
        patch: minimum shape (D, H, W) of the result.

    Returns:
        Image float32 and labels uint8, both (1, D, H, W) and C-contiguous.
    """
    image, label = _resample(scan)
    image = (np.clip(image, *CLIP) - np.float32(MEAN)) / np.float32(DEVIATION)
    padding = [(0, 0), *((bound // 2, bound - bound // 2) for bound in _bounds(image.shape[1:], patch))]
    if any(after for _, after in padding):
        image, label = np.pad(image, padding, "edge"), np.pad(label, padding, "edge")
    return np.ascontiguousarray(image), np.ascontiguousarray(label)


def resampled_shape(shape: tuple[int, ...], spacing: tuple[float, ...]) -> tuple[int, ...]:
    """Return the shape (D, H, W) at ``TARGET_SPACING`` of a volume of ``shape`` voxels at ``spacing``, rounded down."""
    return tuple(int(own / target * size) for size, own, target in zip(shape, spacing, TARGET_SPACING, strict=True))


def voxels_of(image_path: Path, patch: tuple[int, int, int]) -> tuple[int, int]:
    """Return the voxels of a scan and of the volume prepared from it; this reads only the header.

    Raises:
        DataError: the file is not a NIfTI volume.
    """
    try:
        with open_file(image_path) as packed, gzip.open(packed) as file:
            shape, spacing = _geometry(image_path, file.read(_HEADER_BYTES))
    except _UNREADABLE as error:
        raise _unreadable(image_path, error) from error
    resampled = resampled_shape(shape, spacing)
    made = (size + lacking for size, lacking in zip(resampled, _bounds(resampled, patch), strict=True))
    return math.prod(shape), math.prod(made)


def _read(path: Path) -> tuple[NDArray[np.float64], tuple[float, float, float]]:
    """Read values (D, H, W) and spacing of a compressed NIfTI-1 file, and check the CRC of the whole file."""
    try:
        with open_file(path) as packed, gzip.open(packed) as file:
            header = file.read(_HEADER_BYTES)
            _, spacing = _geometry(path, header)
            described = nibabel.Nifti1Header.from_fileobj(io.BytesIO(header))
            # Values follow the header and its extensions; the published files have no extensions.
            size = math.prod(described.get_data_shape()) * described.get_data_dtype().itemsize + _EXTENSION_BYTES
            content = header + file.read(size)
            if file.read(1):
                raise DataError(f"{path} is longer than its header says; fetch it again")
        return np.asarray(nibabel.Nifti1Image.from_bytes(content).get_fdata(caching="unchanged"), np.float64), spacing
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _geometry(path: Path, header: bytes) -> tuple[tuple[int, ...], tuple[float, float, float]]:
    """Return shape and spacing according to the header of a file."""
    shape = nibabel.Nifti1Header.from_fileobj(io.BytesIO(header)).get_data_shape()
    as_written = nibabel.Nifti1Header.from_fileobj(io.BytesIO(header), check=False)  # a check would change 0 to 1
    depth, height, width = (float(axis) for axis in as_written["pixdim"][1:4])
    spacing = (depth, height, width)
    if len(shape) != 3 or 0 in shape:
        raise DataError(f"{path} has the shape {shape}, expected three axes")
    if not all(math.isfinite(axis) and axis > 0 for axis in spacing):
        raise DataError(f"{path}: the spacing {spacing} mm is invalid; fetch it again")
    if not 0 < math.prod(resampled_shape(shape, spacing)) <= _MOST_VOXELS:
        raise DataError(f"{path}: {shape} voxels at {spacing} mm are not possible for a scan; fetch it again")
    return shape, spacing


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read ({type(error).__name__}: {error}); fetch it again")


def _resample(scan: Scan) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Resample image (trilinear, corners aligned) and labels (nearest) to ``TARGET_SPACING``; both are (1, D, H, W)."""
    image_NCDHW = torch.from_numpy(scan.image)[None, None]
    label_NCDHW = torch.from_numpy(scan.label)[None, None]
    if scan.spacing != TARGET_SPACING:
        size = list(resampled_shape(scan.image.shape, scan.spacing))
        image_NCDHW = interpolate(image_NCDHW, size=size, mode="trilinear", align_corners=True)
        label_NCDHW = interpolate(label_NCDHW, size=size, mode="nearest")
    image: NDArray[np.float32] = image_NCDHW[0].numpy()
    label: NDArray[np.uint8] = label_NCDHW[0].numpy()
    return image, label


def _bounds(shape: tuple[int, ...], patch: tuple[int, int, int]) -> list[int]:
    """Return the number of missing voxels of each axis."""
    return [max(0, least - size) for size, least in zip(shape, patch, strict=True)]
