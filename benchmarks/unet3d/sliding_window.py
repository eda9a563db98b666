"""Sliding windows over a volume: its crop, its padding, where windows lie, and how much each of their voxels counts.

Rules: windows of 128 voxels that overlap by half, a Gaussian importance map, the average of logits (MLPerf Training's
reference implementation of 3D U-Net). One definition for every axis, which all evaluation uses.

Axes: D H W of a volume in voxels, K classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.unet3d.window_sums import add_window
from common.errors import ConfigError, DataError

SIGMA = 0.125
"""Standard deviation of the importance map, as a share of the window, before the cube root."""

Slices = tuple[slice, slice, slice]
Origin = tuple[int, int, int]


@dataclass(frozen=True)
class Axis:
    """One axis of a volume.

    Attributes:
        low: voxels cut off at the start, of image and label.
        kept: voxels that remain and are scored.
        padding: voxels added before them, to the image only.
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
    """How the windows cover one volume; ``axes`` are D, H and W."""

    axes: tuple[Axis, Axis, Axis]

    @property
    def kept(self) -> Slices:
        """What is scored, out of the volume."""
        d, h, w = (slice(axis.low, axis.low + axis.kept) for axis in self.axes)
        return d, h, w

    @property
    def inside(self) -> Slices:
        """What is scored, out of the padded image."""
        d, h, w = (slice(axis.padding, axis.padding + axis.kept) for axis in self.axes)
        return d, h, w

    @property
    def padded_shape(self) -> tuple[int, int, int]:
        """Shape of the padded image."""
        d, h, w = (axis.padded for axis in self.axes)
        return d, h, w

    @property
    def voxels(self) -> int:
        """How many are scored."""
        return math.prod(axis.kept for axis in self.axes)

    @property
    def origins(self) -> list[Origin]:
        """First voxel of every window in the padded image, W varying fastest."""
        d, h, w = (axis.starts for axis in self.axes)
        return list(itertools.product(d, h, w))


@dataclass(frozen=True)
class SlidingWindow:
    """Size, overlap and importance of the windows.

    Attributes:
        shape: voxels (D, H, W) of a window.
        overlap: of neighbouring windows, as a share of their size.
        padding_value: of the voxels that are added to an image.

    Raises:
        ConfigError: the distance of neighbouring windows does not divide their size.
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
        """Distance of neighbouring windows on each axis, voxels."""
        d, h, w = (round(size * (1 - self.overlap)) for size in self.shape)
        return d, h, w

    def geometry(self, shape: tuple[int, int, int]) -> Geometry:
        """How the windows cover a volume of ``shape``.

        Raises:
            DataError: an axis is so short that cropping would leave nothing of it.
        """
        d, h, w = (cover(*sizes) for sizes in zip(shape, self.shape, self.strides, strict=True))
        return Geometry((d, h, w))

    def padded(self, kept_DHW: Tensor, geometry: Geometry) -> Tensor:
        """The cropped image (:attr:`Geometry.kept`) with the padding around it, on its device and in its dtype."""
        padded_DHW = kept_DHW.new_full(geometry.padded_shape, self.padding_value)
        padded_DHW[geometry.inside] = kept_DHW
        return padded_DHW

    def importance(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The importance map's three factors, one for each axis: a voxel counts as much as their product.

        The cube root of an outer product of three Gaussian windows, over its maximum, is itself the outer product of
        their cube roots over their maxima.
        """
        factors = []
        for size in self.shape:
            distance = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
            gaussian = torch.exp(-0.5 * (distance / (SIGMA * size)) ** 2)
            root = gaussian ** (1 / 3)
            factors.append((root / root.max()).to(device, dtype))
        return factors


def cover(size: int, window: int, stride: int) -> Axis:
    """Crop or pad an axis of ``size`` voxels to a multiple of ``stride``, and lay windows over it.

    A remainder below half the stride is cropped, a larger one padded; what is then shorter than a window is padded to
    one. Of an odd number of voxels the larger part is cropped or added at the end.

    Raises:
        DataError: cropping would leave nothing.
    """
    remainder = size % stride
    cropped = remainder if 2 * remainder < stride else 0
    kept = size - cropped
    if kept < 1:
        raise DataError(f"an axis of {size} voxels is too short for windows of {window}")
    padded = max(math.ceil(kept / stride) * stride, window)
    starts = tuple(range(0, padded - window + 1, stride))
    return Axis(cropped // 2, kept, (padded - kept) // 2, padded, starts)


def average_logits(image_DHW: Tensor, network: Callable[[Tensor], Tensor], window: SlidingWindow) -> Tensor:
    """Importance-weighted average of the logits of all windows, in plain PyTorch and one window at a time.

    To look at the segmentation of one volume. An evaluation needs no average: the weights of a voxel are the same for
    all classes, so that the largest sum is the largest average.

    Args:
        image_DHW: a volume, in the dtype of the network.
        network: image (1, 1, D, H, W) to logits (1, K, D, H, W) of one window.
        window: the windows.

    Returns:
        Logits (D, H, W, K) of the part that is scored (:attr:`Geometry.kept`), fp32 (fp64 for fp64 logits).
    """
    depth, height, width = image_DHW.shape
    geometry = window.geometry((depth, height, width))
    padded = window.padded(image_DHW[geometry.kept], geometry)
    sums: Tensor | None = None
    for origin in geometry.origins:
        place = tuple(slice(start, start + size) for start, size in zip(origin, window.shape, strict=True))
        logits_KDHW = network(padded[place][None, None])[0]
        if sums is None:
            dtype = torch.float64 if logits_KDHW.dtype == torch.float64 else torch.float32
            importance = window.importance(padded.device, dtype)
            sums = torch.zeros(*padded.shape, len(logits_KDHW), dtype=dtype, device=padded.device)
            weights = torch.zeros(*padded.shape, 1, dtype=dtype, device=padded.device)
            ones = torch.ones(1, *window.shape, dtype=dtype, device=padded.device)
        add_window(sums[place], logits_KDHW, importance)
        add_window(weights[place], ones, importance)
    assert sums is not None  # there is a window in every volume
    return (sums / weights)[geometry.inside]
