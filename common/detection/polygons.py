"""Outlines of objects as a table of polygons: three columns, on the host or on a device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.ragged import bounds_of, take
from common.detection.columns import read_column, write_columns

_PREFIX = "polygons_"


@dataclass(frozen=True)
class Polygons:
    """Polygons of N objects; Q polygons with S points in total. An object may have several polygons.

    Attributes:
        object_bounds: (N + 1,) int32, start of the polygons of each object, then the end of the last one's.
        polygon_bounds: (Q + 1,) int32, start of the points of each polygon, then the end of the last one's.
        xy: (S, 2) px of the original picture; float64 for comparing masks, float32 for training.
    """

    object_bounds: NDArray[np.int32]
    polygon_bounds: NDArray[np.int32]
    xy: NDArray[np.floating]

    @property
    def objects(self) -> int:
        """Number of objects, N."""
        return len(self.object_bounds) - 1

    @property
    def polygons(self) -> int:
        """Number of polygons, Q."""
        return len(self.polygon_bounds) - 1

    @property
    def points(self) -> int:
        """Number of points, S."""
        return len(self.xy)

    def of_object(self, number: int) -> list[NDArray[np.floating]]:
        """Return the polygons of one object, each of shape (points, 2)."""
        parts = range(self.object_bounds[number], self.object_bounds[number + 1])
        return [self.xy[self.polygon_bounds[part] : self.polygon_bounds[part + 1]] for part in parts]

    def taken(self, objects: NDArray[np.integer]) -> Polygons:
        """Return the polygons of the objects with these indices, in this order."""
        part_counts, point_counts = np.diff(self.object_bounds), np.diff(self.polygon_bounds)
        (parts,) = take(part_counts, objects, np.arange(self.polygons))
        (points,) = take(point_counts, parts, np.arange(self.points))
        bounds = [bounds_of(counts).astype(np.int32) for counts in (part_counts[objects], point_counts[parts])]
        return Polygons(bounds[0], bounds[1], self.xy[points])

    def single_precision(self) -> Polygons:
        """Return a copy with float32 points."""
        return Polygons(self.object_bounds, self.polygon_bounds, self.xy.astype(np.float32))

    def write(self, folder: Path) -> list[Path]:
        """Write each column as ``polygons_<name>.npy`` into ``folder``, created if needed; return the files."""
        return write_columns(folder, {f"{_PREFIX}{field.name}": getattr(self, field.name) for field in fields(self)})

    @classmethod
    def read(cls, folder: Path, objects: int, polygons: int, points: int, dtype: type[np.floating[Any]]) -> Polygons:
        """Return the columns in ``folder``; the numbers of objects, polygons and points and ``dtype`` must match.

        Raises:
            DataError: a file is missing, truncated, or of another type or size.
        """
        integer = np.dtype(np.int32)
        return cls(
            read_column(folder / f"{_PREFIX}object_bounds.npy", integer, (objects + 1,)),
            read_column(folder / f"{_PREFIX}polygon_bounds.npy", integer, (polygons + 1,)),
            read_column(folder / f"{_PREFIX}xy.npy", np.dtype(dtype), (points, 2)),
        )
