"""Mask targets of a micro-batch on COCO's pictures: 128 slots a picture, about two fifths of which have an object."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.maskrcnn.ops import mask_targets
from benchmarks.maskrcnn.polygon_table import MADE_UP_BOX, PolygonRoom, PolygonTable
from common.ops.bench import cases
from common.ops.bench.cases import Entry, Pass, each
from common.ops.bench.sweep import Sweep

SLOTS, SIZE = 128, 28
USED = 0.4
ROOM = PolygonRoom(objects=850_000, polygons=970_000, points=20_900_000)
"""COCO's, of which the rows are chosen at random: none is in a cache."""

SCALE = 800 / 480
PICTURES = 12


def case(function: Callable[..., Tensor], batch: int, dtype: torch.dtype) -> list[Pass]:
    """Whatever the dtype: coordinates are fp32 and targets bytes."""
    device = torch.device(cases.DEVICE)
    table, rois = PolygonTable(ROOM, device), batch * SLOTS
    objects = torch.randint(ROOM.objects, (rois,), device=device)
    objects = torch.where(torch.rand(rois, device=device) < USED, objects, -1)
    boxes = torch.tensor(MADE_UP_BOX, device=device) * SCALE + 20 * torch.randn((rois, 4), device=device)
    transform = torch.tensor([SCALE, SCALE, 0.0, 640.0], device=device).repeat(rois, 1)
    points = USED * rois * ROOM.points / ROOM.objects
    moved = float(rois * (SIZE * SIZE + 8 + 32) + 8 * points)
    return [Pass("forward", lambda: function(table, objects, boxes, transform, SIZE), moved)]


def entries() -> list[Entry]:
    """The kernel. The reference waits for the device and cannot be captured."""
    return each("mask_targets", mask_targets.MASK_TARGETS, "triton", {"size": SIZE}, case, only=["triton"])


def sweeps() -> dict[str, Sweep]:
    """Edges at a time and warps."""
    from benchmarks.maskrcnn.ops.mask_targets import triton

    tiles = list(itertools.product((8, 16, 32, 64), (1, 2, 4)))
    build = functools.partial(case, mask_targets.MASK_TARGETS.function("triton"), PICTURES)
    return {"mask_targets": Sweep(triton.TILES, "targets", tiles, build, False)}
