"""Outlines of objects as one table of polygons: three columns, on the host or on a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Polygons:
    """The polygons of N objects, Q in all, of S points in all; an object may have several parts.

    Attributes:
        object_bounds: (N + 1,) int32, where the polygons of each object begin, and where the last one's end.
        polygon_bounds: (Q + 1,) int32, where the points of each polygon begin, and where the last one's end.
        xy: (S, 2) float32, px of the picture as it is published.
    """

    object_bounds: NDArray[np.int32]
    polygon_bounds: NDArray[np.int32]
    xy: NDArray[np.float32]
