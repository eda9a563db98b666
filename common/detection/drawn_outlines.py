"""Outlines of the shapes of :mod:`common.detection.drawn_pictures`, as polygons.

A saltire (an X) has two polygons, which cross; a ring has three and a frame four, which touch; other shapes have one.
The numbers of the shapes are those of :func:`common.detection.drawn_pictures.shape_of`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from common.detection.drawn_pictures import SHAPES, is_recognisable

Points = list[tuple[float, float]]

_ARC = 24
"""Number of points of a whole circle."""
_HOLE = math.sqrt(0.3)
"""Radius of a ring's hole, relative to the ring's radius."""
_ARM = 0.3
"""Half the width of the arms of a cross; distance of a saltire's edges from the corners."""
_BAR = 0.55
"""Inner edge of a frame's bars; the outer edge is at 1."""


def outlines(class_index: int, height: int, width: int, points: int = 0) -> list[NDArray[np.float64]]:
    """Return the polygons of an object, (n, 2) each: x and y in px from the upper left corner of its box.

    Args:
        height, width: size of its box, px.
        points: smallest number of points of each polygon; additional points are on its edges and arcs.
    """
    shape = SHAPES[class_index % len(SHAPES)] if is_recognisable(height, width) else "rectangle"
    arc = max(_ARC, 4 * math.ceil(points / 4))
    scale = np.array([width, height]) / 2
    return [(_divided(part, points) + 1) * scale for part in _parts(shape, arc)]


def _parts(shape: str, arc: int) -> list[Points]:
    """Return the polygons of a shape between -1 and 1; a whole circle has ``arc`` points."""
    if shape == "disc":
        return [_arc(0, 1, 1, arc)[:-1]]
    if shape == "triangle":
        return [[(0, -1), (1, 1), (-1, 1)]]
    if shape == "cross":
        a = _ARM
        right, left = [(a, -a), (1, -a), (1, a), (a, a)], [(-a, a), (-1, a), (-1, -a), (-a, -a)]
        return [[(a, -1), *right, (a, 1), (-a, 1), *left, (-a, -1)]]
    if shape == "ring":
        ends = [(third / 3, (third + 1) / 3) for third in range(3)]
        return [[*_arc(*end, 1, arc), *reversed(_arc(*end, _HOLE, arc))] for end in ends]
    if shape == "diamond":
        return [[(0, -1), (1, 0), (0, 1), (-1, 0)]]
    if shape == "frame":
        across = [_rectangle(-1, -1, 1, -_BAR), _rectangle(-1, _BAR, 1, 1)]
        return [*across, _rectangle(-1, -_BAR, -_BAR, _BAR), _rectangle(_BAR, -_BAR, 1, _BAR)]
    if shape == "saltire":
        near = 1 - _ARM
        bar: Points = [(-1, -1), (-near, -1), (1, near), (1, 1), (near, 1), (-1, -near)]
        return [bar, [(-x, y) for x, y in bar]]
    return [_rectangle(-1, -1, 1, 1)]


def _arc(first: float, last: float, radius: float, whole: int) -> Points:
    """Return points of a circle from ``first`` to ``last``, in fractions of a turn; a turn has ``whole`` points."""
    steps = max(1, round((last - first) * whole))
    turns = [2 * math.pi * (first + (last - first) * step / steps) for step in range(steps + 1)]
    return [(radius * math.cos(turn), radius * math.sin(turn)) for turn in turns]


def _rectangle(left: float, top: float, right: float, bottom: float) -> Points:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _divided(polygon: Points, points: int) -> NDArray[np.float64]:
    """Return the polygon with equally many new points on each edge, so that it has at least ``points``."""
    corners_N2 = np.array(polygon, np.float64)
    each = math.ceil(points / len(polygon)) if points else 1
    shares_E = np.arange(each)[None, :, None] / each
    steps_N2 = np.roll(corners_N2, -1, axis=0) - corners_N2
    divided: NDArray[np.float64] = (corners_N2[:, None] + shares_E * steps_N2[:, None]).reshape(-1, 2)
    return divided
