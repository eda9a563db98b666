"""A training crop, and where it is cut: anywhere in the volume, or around an object of it.

The place follows the rule of MLCommons' reference implementation, with its peculiarities: its integers are drawn from
0 ... n - 1 where n is also a possible place. A random crop never ends at a volume's last voxel (unless it has to), and
of the room that a smaller object leaves in a crop, at least one voxel lies on the high side.

Axes: D H W, in voxels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from benchmarks.unet3d.components import Box, Boxes

Size3 = tuple[int, int, int]

BRIGHTNESS_RANGE = (0.7, 1.3)
"""NVIDIA's factor of the intensities; the reference adds 1 to it."""

NOISE_DEVIATION = 0.1
"""Standard deviation of NVIDIA's noise, and the largest of the reference's."""


@dataclass(frozen=True)
class Draws:
    """What is drawn for a crop beside its place.

    Attributes:
        flips: whether D, H and W are mirrored.
        scale: factor of the intensities.
        deviation: standard deviation of the noise, 0 for none.
        noise_seed: of the noise, 0 ... 2**63 - 1.
    """

    flips: tuple[bool, bool, bool]
    scale: float
    deviation: float
    noise_seed: int


@dataclass(frozen=True)
class Crop:
    """A crop in the memory of the volumes.

    Attributes:
        offset: of the volume's first voxel, in voxels.
        shape: (D, H, W) of the volume.
        origin: of the crop in the volume.
        draws: what happens to it.
    """

    offset: int
    shape: Size3
    origin: Size3
    draws: Draws


@dataclass(frozen=True)
class Slab:
    """The part of every crop that this rank makes.

    Attributes:
        size: (D, H, W) of the whole crop.
        first_plane, planes: which of its D planes.
    """

    size: Size3
    first_plane: int
    planes: int

    @property
    def shape(self) -> Size3:
        """(D, H, W) of the slab."""
        return self.planes, *self.size[1:]

    @property
    def voxels(self) -> int:
        """Voxels of the slab."""
        return math.prod(self.shape)

    @property
    def first_voxel(self) -> int:
        """Index of the slab's first voxel in the whole crop."""
        return self.first_plane * self.size[1] * self.size[2]

    def source_plane(self, mirrored: bool) -> int:
        """The crop's lowest plane, before it is mirrored, that the slab is made of."""
        return self.size[0] - self.first_plane - self.planes if mirrored else self.first_plane

    def cut(self, volumes: Tensor, crop: Crop) -> Tensor:
        """The slab's voxels before they are mirrored, (D, H, W): a view of ``volumes``, (voxels,)."""
        place = volumes[crop.offset : crop.offset + math.prod(crop.shape)].view(crop.shape)
        depth = crop.origin[0] + self.source_plane(crop.draws.flips[0])
        for axis, (start, size) in enumerate(zip((depth, *crop.origin[1:]), self.shape, strict=True)):
            place = place.narrow(axis, start, size)
        return place


def crop_origin(
    generator: np.random.Generator, shape: Size3, size: Size3, oversampling: float, boxes: Callable[[], Boxes]
) -> Size3:
    """Draw the first voxel of a crop.

    Args:
        generator: of all draws.
        shape: of the volume, at least ``size`` on every axis.
        size: of the crop.
        oversampling: share of the crops that are placed on an object.
        boxes: gives the volume's objects; called only where the crop is to be placed on one.

    Returns:
        The crop's origin: ``0 <= origin <= shape - size``. Without an object, a random crop is taken.
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

    On an axis where the object is smaller than the crop, the crop holds all of it; where it is larger, the crop lies
    inside its box. A crop that would leave the volume is moved back to its border, which is what the reference's
    clamping of both ends and its filling up come to.
    """
    d, h, w = (
        min(max(side.start - _margin(generator, part - (side.stop - side.start)), 0), whole - part)
        for side, whole, part in zip(box, shape, size, strict=True)
    )
    return d, h, w


def _margin(generator: np.random.Generator, room: int) -> int:
    """Voxels of the crop before the object; negative where the crop begins inside it."""
    drawn = _below(generator, abs(room))
    return drawn if room >= 0 else -drawn


def _below(generator: np.random.Generator, count: int) -> int:
    """One of 0 ... count - 1; 0 where there is none (the reference's integers)."""
    return int(generator.integers(count)) if count else 0
