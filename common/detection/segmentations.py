"""Masks of objects in COCO's form: polygons, or run lengths if a box is around many objects.

COCO's format: ``segmentation`` of an annotation is a list of polygons, each a list x, y, x, y ... of three points or
more; or an object with ``size``, the picture's height and width, and ``counts``, lengths of runs of pixels
alternately outside and inside, column by column, beginning outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from common.data.ragged import bounds_of, take
from common.detection.columns import read_column, write_columns
from common.detection.json_entries import Entries
from common.detection.polygons import Polygons

LEAST_POINTS = 3
"""Smallest number of points of a polygon."""
FARTHEST = 1 << 14
"""Largest absolute coordinate of a polygon's point, px, because rasterisers use integers."""
_KEY = "segmentation"
_POLYGONS = f"polygons of at least {LEAST_POINTS} points, each an x and a y"


@dataclass(frozen=True)
class Segmentations:
    """Segmentations of N objects; each has either polygons or runs. T runs in total.

    Attributes:
        polygons: (N) polygons, float64 as in the file; none for an object with runs.
        run_bounds: (N + 1,) int64, start of the runs of each object, then the end of the last one's.
        run_lengths: (T,) int32, px.
    """

    polygons: Polygons
    run_bounds: NDArray[np.int64]
    run_lengths: NDArray[np.int32]

    def taken(self, objects: NDArray[np.integer]) -> Segmentations:
        """Return the segmentations of the objects with these indices, in this order."""
        counts = np.diff(self.run_bounds)
        (runs,) = take(counts, objects, self.run_lengths)
        return Segmentations(self.polygons.taken(objects), bounds_of(counts[objects]), runs)

    def has_runs(self) -> NDArray[np.bool_]:
        """Return whether each object has runs, (N,)."""
        return np.diff(self.run_bounds) > 0

    def coco(self, number: int, height: int, width: int) -> list[list[float]] | dict[str, list[int]]:
        """Return one object in COCO's form, in a picture of ``height`` x ``width`` px."""
        first, last = self.run_bounds[number : number + 2]
        if last > first:
            return {"size": [height, width], "counts": self.run_lengths[first:last].tolist()}
        return [xy_S2.reshape(-1).tolist() for xy_S2 in self.polygons.of_object(number)]

    def write(self, folder: Path) -> list[Path]:
        """Write each column as a file into ``folder``, which is created if needed; return the files."""
        runs: dict[str, NDArray[Any]] = {"run_bounds": self.run_bounds, "run_lengths": self.run_lengths}
        return [*self.polygons.write(folder), *write_columns(folder, runs)]

    @classmethod
    def read(cls, folder: Path, objects: int, polygons: int, points: int, runs: int) -> Segmentations:
        """Return the columns in ``folder``; the numbers of objects, polygons, points and runs must match.

        Raises:
            DataError: a file is missing, truncated, or of another type or size.
        """
        return cls(
            Polygons.read(folder, objects, polygons, points, np.float64),
            read_column(folder / "run_bounds.npy", np.dtype(np.int64), (objects + 1,)),
            read_column(folder / "run_lengths.npy", np.dtype(np.int32), (runs,)),
        )

    @classmethod
    def of(cls, boxes: Entries, height_N: NDArray[np.int64], width_N: NDArray[np.int64]) -> Segmentations:
        """Return the segmentations of COCO's ``annotations``, in pictures of these heights and widths.

        Raises:
            DataError: an object has neither polygons nor runs; a polygon has fewer than three points, an odd number
                of coordinates, or a coordinate that is not a number or far outside; runs have another size than the
                picture, or are compressed.
        """
        polygons: list[list[float]] = []
        parts_N, runs_N = np.zeros(len(boxes.entries), np.int64), np.zeros(len(boxes.entries), np.int64)
        runs: list[list[int]] = []
        for number, entry in enumerate(boxes.entries):
            value = entry.get(_KEY)
            if isinstance(value, dict):
                runs.append(_runs(boxes, number, value, [int(height_N[number]), int(width_N[number])]))
                runs_N[number] = len(runs[-1])
            elif isinstance(value, list) and value and all(_is_polygon(part) for part in value):
                polygons += value
                parts_N[number] = len(value)
            else:
                boxes.fail(number, _KEY, f"{_POLYGONS}, or lengths of runs")
        bounds_Q = bounds_of(np.array([len(polygon) // 2 for polygon in polygons], np.int64))
        bounds_N = bounds_of(parts_N)
        xy_S2 = _coordinates(boxes, polygons, int(bounds_Q[-1]), bounds_N)
        return cls(
            Polygons(bounds_N.astype(np.int32), bounds_Q.astype(np.int32), xy_S2),
            bounds_of(runs_N),
            np.fromiter(chain.from_iterable(runs), np.int32),
        )


def _is_polygon(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= 2 * LEAST_POINTS and len(value) % 2 == 0


def _runs(boxes: Entries, number: int, value: dict[str, Any], size: list[int]) -> list[int]:
    """Return the lengths of an object's runs, which must cover a picture of ``size`` (height, width)."""
    if value.get("size") != size:
        boxes.fail(number, _KEY, f"run lengths of 'size' {size}, the picture's height and width")
    counts = value.get("counts")
    if not _are_lengths(counts) or sum(counts) != size[0] * size[1]:
        boxes.fail(number, _KEY, f"run lengths, a list 'counts' of integers that make {size[0]} x {size[1]} together")
    return counts


def _are_lengths(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _coordinates(
    boxes: Entries, polygons: list[list[float]], points: int, bounds_N: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return (points, 2) of all polygons; those of object n are the polygons from ``bounds_N[n]`` on."""
    kinds = set(map(type, chain.from_iterable(polygons)))
    flat: NDArray[np.float64] | None = None
    if kinds <= {int, float}:
        try:
            flat = np.fromiter(chain.from_iterable(polygons), np.float64, 2 * points)
        except OverflowError:  # an integer was too large
            flat = None
    if flat is None or not np.all(np.abs(flat) <= FARTHEST):  # NaN fails this comparison too
        wrong = next(_misplaced(polygons))
        number = int(np.searchsorted(bounds_N, wrong, side="right")) - 1
        boxes.fail(number, _KEY, f"{_POLYGONS}, numbers from {-FARTHEST} to {FARTHEST}")
    return flat.reshape(points, 2)


def _misplaced(polygons: list[list[float]]) -> Iterator[int]:
    """Yield the indices of polygons with a value that is not a number or too large."""
    for index, polygon in enumerate(polygons):
        if not all(type(value) in (int, float) and -FARTHEST <= value <= FARTHEST for value in polygon):
            yield index
