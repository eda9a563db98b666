"""Where a training crop is cut: anywhere in the volume, or around an object of it.

This is the rule of MLCommons' reference implementation, with its peculiarities: its integers are drawn from 0 ... n - 1
where n is also a possible place. A random crop never ends at a volume's last voxel (unless it has to), and of the room
that a smaller object leaves in a crop, at least one voxel lies on the high side.

Axes: D H W, in voxels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.unet3d.components import Box, Boxes

Place = tuple[int, int, int]


def crop_origin(
    generator: np.random.Generator, shape: Place, size: Place, oversampling: float, boxes: Callable[[], Boxes]
) -> Place:
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


def on_object(generator: np.random.Generator, box: Box, shape: Place, size: Place) -> Place:
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
