# mypy: allow-untyped-defs
"""Triton kernel of the mask targets, with one program per RoI.

A program loops over the polygons of its object and over their edges, EDGES at a time, for all columns of the mask at
once. A column is the bits of an int32, row 0 the lowest. An edge that flips the column from a row downwards is an XOR
with ones from that bit upwards, and the order of edges does not matter. So the kernel needs neither sorting nor run
lengths, and the mask stays in registers until it is written.

For 1,536 RoIs, 24 points per object and 28 columns there are a million pairs of edge and column, with about 30 float64
operations each. The time is dominated by the chain of three dependent loads to the first point.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.maskrcnn.ops.mask_targets import MOST_ROWS
from benchmarks.maskrcnn.polygon_table import PolygonTable
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

FINER: tl.constexpr = tl.constexpr(5)


@triton.jit
def _on_the_fine_grid(xy_ptr, point, exists, scale, mirrored, last, corner, to_raster, AXIS: tl.constexpr):
    """Return a coordinate of points as float64 integers; every step before the last is rounded to fp32."""
    resized = tl.load(xy_ptr + 2 * point + AXIS, mask=exists, other=0.0) * scale
    if AXIS == 0:
        resized = tl.where(mirrored, last - resized - 1.0, resized)
    drawn = ((resized - corner) * to_raster).to(tl.float64)
    return (drawn * FINER + 0.5).to(tl.int32).to(tl.float64)


@triton.jit
def _before(xs, slope, step, left, rising):
    """Return whether x has not yet crossed the middle of the column after ``step`` steps."""
    return ((xs + slope * step) + 0.5 >= left + 1) != rising


@triton.jit
def _flips(x0, y0, x1, y1, left, SIZE: tl.constexpr):
    """Return the bits of the rows that each edge (EDGES, 1) flips in each column; 0 if it does not cross the middle."""
    along_x = tl.abs(x1 - x0) >= tl.abs(y1 - y0)
    backwards = tl.where(along_x, x0 > x1, y0 > y1)
    xs = tl.where(backwards, x1, x0)
    ys = tl.where(backwards, y1, y0)
    xe = tl.where(backwards, x0, x1)
    ye = tl.where(backwards, y0, y1)
    rising = xe > xs
    passes = (tl.minimum(xs, xe) <= left) & (tl.maximum(xs, xe) > left)

    slope = (ye - ys) / tl.maximum(xe - xs, 1.0)
    step = left - xs
    row_along_x = tl.minimum((ys + slope * step) + 0.5, (ys + slope * (step + 1)) + 0.5)

    slope = (xe - xs) / tl.maximum(ye - ys, 1.0)
    guess = tl.floor((left + 0.5 - xs) * (1.0 / tl.where(xe == xs, 1.0, slope)))  # can have a rounding error
    missed = _before(xs, slope, guess, left, rising)
    missed_again = missed & _before(xs, slope, guess + 1, left, rising)
    row_along_y = ys + guess + missed.to(tl.float64) + missed_again.to(tl.float64) - 1

    row = tl.where(along_x, row_along_x, row_along_y)
    row = tl.minimum(tl.maximum(row, 0.0), FINER * SIZE).to(tl.int32)
    from_bit = (row + 2) // FINER
    return tl.where(passes, -1 << from_bit, 0)  # bits after the last row are never read


@triton.jit
def mask_targets_kernel(
    object_bounds_ptr,  # (N + 1,) int32
    polygon_bounds_ptr,  # (Q + 1,) int32
    xy_ptr,  # (S, 2) fp32
    object_ptr,  # (R,) int64
    boxes_ptr,  # (R, 4) fp32
    transform_ptr,  # (R, 4) fp32
    target_ptr,  # (R, SIZE, SIZE) uint8
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Store the mask of one RoI's object, drawn inside its box, 0 or 1 per cell; all 0 if the RoI has no object.

    Grid (R,). COLUMNS is SIZE rounded up to a power of two.
    """
    roi = tl.program_id(0).to(tl.int64)
    owner = tl.load(object_ptr + roi)
    there = owner >= 0
    first = tl.load(object_bounds_ptr + owner, mask=there, other=0)
    end = tl.load(object_bounds_ptr + owner + 1, mask=there, other=0)

    x1 = tl.load(boxes_ptr + 4 * roi)
    y1 = tl.load(boxes_ptr + 4 * roi + 1)
    extent_x = tl.maximum(tl.load(boxes_ptr + 4 * roi + 2) - x1, 1.0)
    extent_y = tl.maximum(tl.load(boxes_ptr + 4 * roi + 3) - y1, 1.0)
    to_raster_x = (SIZE / extent_x.to(tl.float64)).to(tl.float32)
    to_raster_y = (SIZE / extent_y.to(tl.float64)).to(tl.float32)
    scale_x = tl.load(transform_ptr + 4 * roi)
    scale_y = tl.load(transform_ptr + 4 * roi + 1)
    mirrored = tl.load(transform_ptr + 4 * roi + 2) > 0
    width = tl.floor(tl.load(transform_ptr + 4 * roi + 3) * scale_x + 0.5)

    column = tl.arange(0, COLUMNS)
    left = (column.to(tl.float64) * FINER + 2)[None, :]
    inside = tl.zeros((COLUMNS,), tl.int32)
    for polygon in range(first, end):
        begin = tl.load(polygon_bounds_ptr + polygon)
        points = tl.load(polygon_bounds_ptr + polygon + 1) - begin
        flips = tl.zeros((EDGES, COLUMNS), tl.int32)
        for start in range(0, points, EDGES):
            edge = start + tl.arange(0, EDGES)
            exists = edge < points
            point = begin.to(tl.int64) + edge
            follower = begin.to(tl.int64) + tl.where(edge + 1 == points, 0, edge + 1)
            own_x = _on_the_fine_grid(xy_ptr, point, exists, scale_x, mirrored, width, x1, to_raster_x, 0)
            own_y = _on_the_fine_grid(xy_ptr, point, exists, scale_y, mirrored, width, y1, to_raster_y, 1)
            next_x = _on_the_fine_grid(xy_ptr, follower, exists, scale_x, mirrored, width, x1, to_raster_x, 0)
            next_y = _on_the_fine_grid(xy_ptr, follower, exists, scale_y, mirrored, width, y1, to_raster_y, 1)
            flips ^= _flips(own_x[:, None], own_y[:, None], next_x[:, None], next_y[:, None], left, SIZE)
        inside |= tl.xor_sum(flips, 0)

    row = tl.arange(0, COLUMNS)[:, None]
    bit = (inside[None, :] >> row) & 1
    in_mask = (row < SIZE) & (column[None, :] < SIZE)
    target_ptr += roi * SIZE * SIZE
    tl.store(target_ptr + row * SIZE + column[None, :], bit.to(tl.uint8), mask=in_mask)


TILES: dict[str, Tile] = {"targets": Tile(edges=32, warps=2)}
"""``edges``: edges of a polygon that a program handles at a time."""


@torch.no_grad()
def mask_targets(table: PolygonTable, object_R: Tensor, boxes_R4: Tensor, transform_R4: Tensor, size: int) -> Tensor:
    """Return the target (R, S, S) uint8 of the mask head for each RoI: 1 inside, else 0.

    See :func:`benchmarks.maskrcnn.ops.mask_targets.mask_targets_reference`. Bit-identical to it.

    Raises:
        ValueError: a mask has more than :data:`MOST_ROWS` rows.
    """
    if size > MOST_ROWS:
        raise ValueError(f"masks have at most {MOST_ROWS} rows, not {size}")
    target_RSS = torch.empty((len(object_R), size, size), dtype=torch.uint8, device=object_R.device)
    if not target_RSS.numel():
        return target_RSS
    columns = table.object_bounds, table.polygon_bounds, table.xy
    require_contiguous(object_bounds=columns[0], polygon_bounds=columns[1], xy=columns[2])
    tile = TILES["targets"]
    mask_targets_kernel[(len(object_R),)](
        *columns, object_R.contiguous(), boxes_R4.contiguous(), transform_R4.contiguous(), target_RSS,
        SIZE=size, COLUMNS=triton.next_power_of_2(size), EDGES=tile.edges,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return target_RSS
