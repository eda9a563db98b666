"""Sliding windows over a volume: crop, padding, positions and importance of windows, sums of logits, class counts.

Rules: windows of 128 voxels that overlap by half, a Gaussian importance map, the average of logits (MLPerf Training's
reference implementation of 3D U-Net). All axes and all evaluations use the same definition.

Sums are stored as (D, H, W, K), so a row of a ``channels_last_3d`` window is added to contiguous memory. Windows are
added one by one in stream order, so overlapping windows do not race and the sums of a rank are reproducible. Nothing
waits for the device. Axes: D H W of a volume in voxels, K classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError, DataError

SIGMA = 0.125
"""Standard deviation of the importance map before the cube root, as a fraction of the window."""
INTERSECTION, PREDICTED, LABELLED = range(3)
"""Columns of the counts of a class: voxels that are both predicted and labelled, predicted, labelled."""

Slices = tuple[slice, slice, slice]
Origin = tuple[int, int, int]


@dataclass(frozen=True)
class Axis:
    """Crop, padding and windows along one axis of a volume.

    Attributes:
        low: voxels cropped at the start, from image and label.
        kept: voxels that remain and are scored.
        padding: voxels added at the start, to the image only.
        padded: voxels after padding.
        starts: first voxel of every window, in the padded image.
    """

    low: int
    kept: int
    padding: int
    padded: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """Crop, padding and windows of one volume; ``axes`` are D, H and W."""

    axes: tuple[Axis, Axis, Axis]

    @property
    def kept(self) -> Slices:
        """Return the scored part of the volume."""
        d, h, w = (slice(axis.low, axis.low + axis.kept) for axis in self.axes)
        return d, h, w

    @property
    def inside(self) -> Slices:
        """Return the scored part of the padded image."""
        d, h, w = (slice(axis.padding, axis.padding + axis.kept) for axis in self.axes)
        return d, h, w

    @property
    def padded_shape(self) -> tuple[int, int, int]:
        """Return the shape of the padded image."""
        d, h, w = (axis.padded for axis in self.axes)
        return d, h, w

    @property
    def voxels(self) -> int:
        """Return the number of scored voxels."""
        return math.prod(axis.kept for axis in self.axes)

    @property
    def origins(self) -> list[Origin]:
        """Return the first voxel of every window in the padded image, W varying fastest."""
        d, h, w = (axis.starts for axis in self.axes)
        return list(itertools.product(d, h, w))


@dataclass(frozen=True)
class SlidingWindow:
    """Size, overlap and importance of the windows.

    Attributes:
        shape: voxels (D, H, W) of a window.
        overlap: overlap of neighbouring windows, as a fraction of their size.
        padding_value: value of the voxels that are added to an image.

    Raises:
        ConfigError: the stride of the windows does not divide their size.
    """

    shape: tuple[int, int, int]
    overlap: float
    padding_value: float

    def __post_init__(self) -> None:
        for size in self.shape:
            stride = size * (1 - self.overlap)
            if stride < 1 or not math.isclose(stride, round(stride)) or size % round(stride):
                raise ConfigError(
                    f"benchmark.facts.overlap={self.overlap}: windows of {size} voxels would lie {stride:g} apart; the "
                    "distance must be a whole number that divides their size, as with an overlap of 0.5"
                )

    @property
    def strides(self) -> tuple[int, int, int]:
        """Return the stride of the windows on each axis, voxels."""
        d, h, w = (round(size * (1 - self.overlap)) for size in self.shape)
        return d, h, w

    def geometry(self, shape: tuple[int, int, int]) -> Geometry:
        """Return crop, padding and windows of a volume of ``shape``.

        Raises:
            DataError: an axis is so short that nothing would remain after cropping.
        """
        d, h, w = (cover(*sizes) for sizes in zip(shape, self.shape, self.strides, strict=True))
        return Geometry((d, h, w))

    def padded(self, kept_DHW: Tensor, geometry: Geometry) -> Tensor:
        """Return the cropped image (:attr:`Geometry.kept`) with padding, on its device and in its dtype."""
        padded_DHW = kept_DHW.new_full(geometry.padded_shape, self.padding_value)
        padded_DHW[geometry.inside] = kept_DHW
        return padded_DHW

    def importance(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return the factors of the importance map for each axis; the importance of a voxel is their product.

        The reference takes the cube root of an outer product of three Gaussian windows, divided by its maximum. This
        equals the outer product of the cube roots, each divided by its maximum.
        """
        factors = []
        for size in self.shape:
            distance = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
            gaussian = torch.exp(-0.5 * (distance / (SIGMA * size)) ** 2)
            root = gaussian ** (1 / 3)
            factors.append((root / root.max()).to(device, dtype))
        return factors


def cover(size: int, window: int, stride: int) -> Axis:
    """Crop or pad an axis of ``size`` voxels to a multiple of ``stride``, and position windows on it.

    A remainder of less than half the stride is cropped, a larger one padded; the result is padded to at least one
    window. If the number of voxels is odd, the larger part is cropped or added at the end.

    Raises:
        DataError: nothing would remain after cropping.
    """
    remainder = size % stride
    cropped = remainder if 2 * remainder < stride else 0
    kept = size - cropped
    if kept < 1:
        raise DataError(f"an axis of {size} voxels is too short for windows of {window}")
    padded = max(math.ceil(kept / stride) * stride, window)
    starts = tuple(range(0, padded - window + 1, stride))
    return Axis(cropped // 2, kept, (padded - kept) // 2, padded, starts)


def add_window(sums_DHWK: Tensor, logits_KDHW: Tensor, importance: Sequence[Tensor]) -> None:
    """Add the logits of a window, multiplied by the importance of each voxel.

    Args:
        sums_DHWK: view of the volume's sums at the window, fp32 or fp64.
        logits_KDHW: any floating-point dtype and strides.
        importance: factors (D,), (H,) and (W,), in the dtype of the sums.
    """
    d, h, w = importance
    weight_DHW1 = ((d[:, None, None] * h[:, None]) * w)[..., None]
    sums_DHWK += logits_KDHW.permute(1, 2, 3, 0).to(sums_DHWK.dtype) * weight_DHW1


def count_classes(sums_DHWK: Tensor, label_DHW: Tensor, counts_K3: Tensor) -> None:
    """Add the voxels of every class to its counts; the prediction of a voxel is the first class with the largest sum.

    Args:
        sums_DHWK: may be a view.
        label_DHW: uint8.
        counts_K3: int64; columns ``INTERSECTION``, ``PREDICTED`` and ``LABELLED``.
    """
    predicted_DHW = sums_DHWK.argmax(-1)
    for label, counts_3 in enumerate(counts_K3):
        predicted, labelled = predicted_DHW == label, label_DHW == label
        counts_3 += torch.stack([(predicted & labelled).sum(), predicted.sum(), labelled.sum()])
