"""Cases of the mask targets: 12 pictures with 128 slots each. About two fifths of the slots have an object of COCO."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.polygon_table import EXAMPLE_BOX, PolygonCapacity, PolygonTable
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Case, Draw, Pass

FACTS = fixed_facts(Facts, "maskrcnn")


def passes(
    function: Callable[..., Tensor],
    draw: Draw,
    rois: int,
    size: int,
    used: float,
    capacity: PolygonCapacity,
    jagged: bool = False,
    still: bool = False,
    noise: float = 20.0,
) -> list[Pass]:
    """Make the forward pass. Objects are chosen at random, so that none is in a cache. RoIs without an object hold NaN.

    Args:
        size: height and width of a target, in pixels.
        used: fraction of the RoIs that have an object.
        jagged: whether outlines are random points and objects have random numbers of parts. Otherwise they are discs.
        still: whether pictures have their published size and are not mirrored, and points lie at multiples of half a
            RoI pixel, where rounding has ties.
        noise: standard deviation of the corners of RoIs from the corners of objects, in pixels.
    """
    table = PolygonTable(capacity, draw.device)
    low, high = (-3.0, 31.0) if still else (30.0, 250.0)
    if jagged:
        _cut(draw, table.object_bounds, capacity.polygons)
        _cut(draw, table.polygon_bounds, capacity.points)
        points = draw.uniform(capacity.points, 2, low=low, high=high, dtype=torch.float32)
        table.xy.copy_((2 * points).round() / 2 if still else points)
    there = draw.uniform(rois, dtype=torch.float32) < used
    objects = torch.where(there, draw.integers(0, capacity.objects, rois), -1)
    scale = draw.uniform(rois, 2, low=1.4, high=1.9, dtype=torch.float32)
    mirrored, width = draw.integers(0, 2, rois), draw.integers(300, 641, rois)
    boxes = torch.tensor(EXAMPLE_BOX, device=draw.device) * scale.repeat(1, 2)
    mirrored_x = (width * scale[:, 0]).round()[:, None] - 1 - boxes[:, [2, 0]]
    boxes[:, ::2] = torch.where(mirrored[:, None] > 0, mirrored_x, boxes[:, ::2])
    boxes += noise * draw.normal(rois, 4, dtype=torch.float32)
    transform = torch.stack([scale[:, 0], scale[:, 1], mirrored, width], 1)
    if still:
        transform = torch.tensor([1.0, 1.0, 0.0, 640.0], device=draw.device).repeat(rois, 1)
        boxes = torch.tensor([0, 0, size, size], device=draw.device).float().repeat(rois, 1)
    boxes, transform = (column.masked_fill(~there[:, None], float("nan")) for column in (boxes, transform))
    moved = rois * (size * size + 8 + 32) + 8 * used * rois * capacity.points / capacity.objects
    return [Pass("forward", lambda: function(table, objects, boxes, transform, size), moved)]


def _cut(draw: Draw, bounds: Tensor, parts: int) -> None:
    """Distribute ``parts`` at random, in place: ``bounds`` has the first part of each owner."""
    bounds[1:-1] = draw.integers(0, parts + 1, len(bounds) - 2).sort().values


JAGGED = {"capacity": PolygonCapacity(objects=24, polygons=44, points=1000), "jagged": True, "noise": 90.0, "used": 0.8}

CASES = (
    Case(
        "Mask R-CNN",
        passes,
        {
            "rois": 12 * FACTS.mask_slots,
            "size": FACTS.mask_size,
            "used": 0.4,
            "capacity": PolygonCapacity(objects=850_000, polygons=970_000, points=20_900_000),
        },
        tests=[
            {"rois": 16, **JAGGED},
            {"rois": 10, "size": 31, **JAGGED, "still": True},
            {"rois": 5, "size": 7, **JAGGED},
            {"rois": 3, "used": 0.0, "capacity": PolygonCapacity(5, 7, 210)},
            {"rois": 0, "capacity": PolygonCapacity(5, 7, 210)},
        ],
        gpu={"jagged": True, "noise": 90.0},
        dtypes=(torch.bfloat16,),
    ),
)
