"""Outlines of all training objects in device memory, at fixed addresses.

A CUDA graph reads a table at its address during the capture, which happens before data may be read. The table is
therefore allocated with a capacity from the configuration and has synthetic outlines. Later, the outlines of the data
are copied into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config.ranges import AtLeast
from common.detection.polygons import Polygons
from common.errors import DataError

EXAMPLE_BOX = (80.0, 40.0, 240.0, 200.0)
"""Corners in px of the disc that all objects are in a table without data."""


@dataclass(frozen=True)
class PolygonCapacity:
    """Capacity of a polygon table, which is allocated before data may be read.

    Attributes:
        objects, polygons, points: maximum numbers over all training pictures.
    """

    objects: Annotated[int, AtLeast(1)]
    polygons: Annotated[int, AtLeast(1)]
    points: Annotated[int, AtLeast(1)]


class PolygonTable:
    """Polygons as columns on a device; see :class:`common.detection.polygons.Polygons`.

    Attributes:
        capacity: N, Q and S are its objects, polygons and points.
        object_bounds: (N + 1,) int32. Objects that the data do not have own no polygon.
        polygon_bounds: (Q + 1,) int32.
        xy: (S, 2) fp32, px of the published picture.
    """

    def __init__(self, capacity: PolygonCapacity, device: torch.device) -> None:
        """Fill the whole capacity with discs in :data:`EXAMPLE_BOX`."""
        self.capacity = capacity
        self.object_bounds = _shared_out(capacity.polygons, capacity.objects, device)
        self.polygon_bounds = _shared_out(capacity.points, capacity.polygons, device)
        around = max(capacity.points // capacity.polygons, 1)
        angle = torch.arange(capacity.points, device=device) % around * (2 * math.pi / around)
        x1, y1, x2, y2 = EXAMPLE_BOX
        columns = (x1 + x2) / 2 + (x2 - x1) / 2 * angle.cos(), (y1 + y2) / 2 + (y2 - y1) / 2 * angle.sin()
        self.xy = torch.stack(columns, 1).float()

    @torch.no_grad()
    def load(self, polygons: Polygons) -> None:
        """Replace the content in place by ``polygons``.

        Raises:
            DataError: the data exceed the capacity, or their bounds do not fit their columns.
        """
        found = {
            "objects": len(polygons.object_bounds) - 1,
            "polygons": len(polygons.polygon_bounds) - 1,
            "points": len(polygons.xy),
        }
        if any(number > getattr(self.capacity, name) for name, number in found.items()):
            has = ", ".join(f"{number:,} {name}" for name, number in found.items())
            needed = ", ".join(f"{name}: {number}" for name, number in found.items())
            raise DataError(
                f"the training pictures have {has}, but the table holds at most {self.capacity.objects:,}, "
                f"{self.capacity.polygons:,} and {self.capacity.points:,}; set reader.polygon_capacity={{{needed}}}"
            )
        _check(polygons.object_bounds, found["polygons"], "object_bounds")
        _check(polygons.polygon_bounds, found["points"], "polygon_bounds")
        for own, bounds in (
            (self.object_bounds, polygons.object_bounds),
            (self.polygon_bounds, polygons.polygon_bounds),
        ):
            own[: len(bounds)].copy_(torch.from_numpy(np.ascontiguousarray(bounds)))
            own[len(bounds) :].fill_(int(bounds[-1]))
        self.xy[: found["points"]].copy_(torch.from_numpy(np.ascontiguousarray(polygons.xy)))


def _shared_out(parts: int, owners: int, device: torch.device) -> Tensor:
    """Return bounds, (owners + 1,) int32, that distribute the parts as evenly as possible."""
    return (torch.arange(owners + 1, device=device) * parts // owners).int()


def _check(bounds: NDArray[np.int32], end: int, name: str) -> None:
    if bounds[0] != 0 or bounds[-1] != end or np.any(bounds[1:] < bounds[:-1]):
        raise DataError(f"the training pictures' {name} don't rise from 0 to {end:,}; prepare the data anew")
