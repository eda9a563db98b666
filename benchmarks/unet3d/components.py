"""Boxes of the largest connected components of a label; foreground crops are placed on them.

Axes: D H W.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Box: TypeAlias = tuple[slice, slice, slice]
Boxes: TypeAlias = dict[int, tuple[Box, ...]]
"""Boxes of the largest components by class, the largest last. Absent classes are left out."""

LARGEST = 2
"""Number of components kept per class (rule of the reference)."""


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
        here = foreground == number
        around = _bounds(here)
        if around is None:
            continue
        components, _ = ndimage.label(here[around])
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


def _span(places: NDArray[np.intp]) -> slice:
    return slice(int(places[0]), int(places[-1]) + 1)


def _shifted(box: Box, offset: list[int]) -> Box:
    d, h, w = (slice(side.start + by, side.stop + by) for side, by in zip(box, offset, strict=True))
    return d, h, w


def _volume(box: Box) -> int:
    return int(np.prod([side.stop - side.start for side in box]))
