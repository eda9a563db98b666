"""Training crops and their positions: random in the volume, or on one of its objects, the components of its labels.

Positions follow MLCommons' reference implementation, with its peculiarity that integers are drawn from 0 ... n - 1
although n is possible, too. So a random crop never ends at the last voxel of a volume (unless the sizes are equal),
and if an object is smaller than the crop, at least one free voxel is on its high side.

Axes: D H W, in voxels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

Size3 = tuple[int, int, int]
Box: TypeAlias = tuple[slice, slice, slice]
Boxes: TypeAlias = dict[int, tuple[Box, ...]]
"""Boxes of the largest components by class, the largest last. Absent classes are left out."""

LARGEST = 2
"""Number of components kept per class (rule of the reference)."""

BRIGHTNESS_RANGE = (0.7, 1.3)
"""Range of NVIDIA's intensity factor; the reference adds 1 to the factor."""

NOISE_DEVIATION = 0.1
"""Standard deviation of NVIDIA's noise; the maximum of the reference's."""


@dataclass(frozen=True)
class CropDraws:
    """The random numbers of a crop, except its position.

    Attributes:
        flips: whether D, H and W are mirrored.
        scale: factor of the intensities.
        deviation: standard deviation of the noise, 0 for none.
        noise_seed: seed of the noise, 0 ... 2**63 - 1.
    """

    flips: tuple[bool, bool, bool]
    scale: float
    deviation: float
    noise_seed: int


@dataclass(frozen=True)
class VolumeCrop:
    """A crop, with its position in the memory of the volumes.

    Attributes:
        offset: index of the volume's first voxel in memory.
        shape: (D, H, W) of the volume.
        origin: first voxel of the crop in the volume.
    """

    offset: int
    shape: Size3
    origin: Size3
    draws: CropDraws


@dataclass(frozen=True)
class Slab:
    """The planes of each crop that this rank computes.

    Attributes:
        size: (D, H, W) of the whole crop.
        first_plane, planes: index of the first plane, and number of planes, along D.
    """

    size: Size3
    first_plane: int
    planes: int

    @property
    def shape(self) -> Size3:
        """Return (D, H, W) of the slab."""
        return self.planes, *self.size[1:]

    @property
    def voxels(self) -> int:
        """Return the number of voxels of the slab."""
        return math.prod(self.shape)

    @property
    def first_voxel(self) -> int:
        """Return the index of the slab's first voxel in the whole crop."""
        return self.first_plane * self.size[1] * self.size[2]

    def source_plane(self, mirrored: bool) -> int:
        """Return the lowest source plane of the slab in the crop before mirroring along D, if it is ``mirrored``."""
        return self.size[0] - self.first_plane - self.planes if mirrored else self.first_plane

    def cut(self, volumes: Tensor, crop: VolumeCrop) -> Tensor:
        """Return the slab before mirroring, (D, H, W), as a view of ``volumes``, (voxels,)."""
        part = volumes[crop.offset : crop.offset + math.prod(crop.shape)].view(crop.shape)
        depth = crop.origin[0] + self.source_plane(crop.draws.flips[0])
        for axis, (start, size) in enumerate(zip((depth, *crop.origin[1:]), self.shape, strict=True)):
            part = part.narrow(axis, start, size)
        return part


def crop_origin(
    generator: np.random.Generator, shape: Size3, size: Size3, oversampling: float, boxes: Callable[[], Boxes]
) -> Size3:
    """Draw the first voxel of a crop.

    Args:
        shape: shape of the volume, at least ``size`` on every axis.
        oversampling: probability that the crop is placed on an object.
        boxes: returns the objects of the volume; called only if the crop is to be placed on one.

    Returns:
        The origin: ``0 <= origin <= shape - size``. If the volume has no object, the position is random.
    """
    if generator.random() < oversampling:
        objects = boxes()
        if objects:
            number = sorted(objects)[generator.integers(len(objects))]
            chosen = objects[number][generator.integers(len(objects[number]))]
            return on_object(generator, chosen, shape, size)
    d, h, w = (_below(generator, whole - part) for whole, part in zip(shape, size, strict=True))
    return d, h, w


def on_object(generator: np.random.Generator, box: Box, shape: Size3, size: Size3) -> Size3:
    """Draw the origin of a crop on the object in ``box``.

    On an axis where the object is smaller than the crop, the crop contains all of it; where it is larger, the crop is
    inside its box. A crop that would leave the volume is moved to the border. The reference gets the same result by
    clamping both ends and extending the crop.
    """
    d, h, w = (
        min(max(side.start - _margin(generator, part - (side.stop - side.start)), 0), whole - part)
        for side, whole, part in zip(box, shape, size, strict=True)
    )
    return d, h, w


def _margin(generator: np.random.Generator, free: int) -> int:
    """Return the voxels of the crop before the object; negative if the crop starts inside it.

    Args:
        free: size of the crop minus that of the object.
    """
    drawn = _below(generator, abs(free))
    return drawn if free >= 0 else -drawn


def _below(generator: np.random.Generator, count: int) -> int:
    """Draw an integer from 0 ... count - 1; return 0 if count is 0 (as the reference does)."""
    return int(generator.integers(count)) if count else 0


def largest_boxes(label: NDArray[np.uint8]) -> Boxes:
    """Return, for each class, the boxes of the components whose boxes are largest.

    Voxels of a class that share a face are connected. If boxes have the same volume, those with later first voxels
    are kept, as in the reference, which sorts and takes the end.

    Args:
        label: (D, H, W), 0 for the background.
    """
    whole = _bounds(label != 0)
    if whole is None:
        return {}
    foreground = label[whole]
    found: Boxes = {}
    for number in range(1, int(foreground.max()) + 1):
        mask = foreground == number
        around = _bounds(mask)
        if around is None:
            continue
        components, _ = ndimage.label(mask[around])
        offset = [outer.start + inner.start for outer, inner in zip(whole, around, strict=True)]
        boxes = [_shifted(box, offset) for box in ndimage.find_objects(components)]
        found[number] = tuple(sorted(boxes, key=_volume)[-LARGEST:])
    return found


def _bounds(mask: NDArray[np.bool_]) -> Box | None:
    """Return the smallest box around all true voxels, or None if there are none."""
    depth = np.flatnonzero(mask.any(axis=(1, 2)))
    if not len(depth):
        return None
    planes: NDArray[np.bool_] = np.logical_or.reduce(mask[depth[0] : depth[-1] + 1], axis=0)
    height, width = np.flatnonzero(planes.any(axis=1)), np.flatnonzero(planes.any(axis=0))
    return _span(depth), _span(height), _span(width)


def _span(indices: NDArray[np.intp]) -> slice:
    return slice(int(indices[0]), int(indices[-1]) + 1)


def _shifted(box: Box, offset: list[int]) -> Box:
    d, h, w = (slice(side.start + by, side.stop + by) for side, by in zip(box, offset, strict=True))
    return d, h, w


def _volume(box: Box) -> int:
    return int(np.prod([side.stop - side.start for side in box]))
