"""Mask targets: the outline of each RoI's object, clipped to the RoI and drawn at the mask head's resolution.

The result is bit-identical to the reference's. Its steps, in the same fp32 operations, move a point of the published
picture to the RoI's raster of ``size`` x ``size``:

1. Resized picture: multiply by the scale. If mirrored, x becomes W - x - 1 for a width of W px.
2. RoI: subtract its first corner.
3. Raster: multiply by size / max(x2 - x1, 1), without the 1 that legacy widths add elsewhere.

COCO's rasteriser (``rleFrPoly`` of its mask API) continues in float64. It rounds points to a grid that is five times
finer and walks along every edge in unit steps of the longer axis. Where the line crosses the middle of a raster
column, which is between 5 n + 2 and 5 n + 3 on the fine grid, it records the first row below the line. From that row
downwards, the edge swaps inside and outside. The parts of an object are united.

The reference and the Triton kernel draw without walking: an edge crosses the middle of a column at most once, at a
step that follows from its slope. The same float64 expression, in the same order and without fused operations, gives
the row of this step.

Shapes: R RoIs, P polygons of all RoIs, E edges (as many as points) of all RoIs, S rows and columns of a mask. On a GPU
the reference waits for the device, since P and E are shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.maskrcnn.polygon_table import PolygonTable
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

FINER = 5
"""Steps of the fine grid per pixel of the mask."""
MOST_ROWS = 31
"""Maximum number of rows in the Triton kernel, where a column is the bits of an int32."""


@torch.no_grad()
def mask_targets_reference(
    table: PolygonTable, object_R: Tensor, boxes_R4: Tensor, transform_R4: Tensor, size: int
) -> Tensor:
    """Return the target of the mask head for each RoI.

    Args:
        table: outlines of all objects.
        object_R: int64, table row of each RoI's object, or -1.
        boxes_R4: fp32 corners of the RoIs in the resized picture, px.
        transform_R4: fp32; scales of x and y, 1 if the picture was mirrored, and width of the published picture. The
            resized width is the product of width and scale, rounded to the nearest integer.
        size: S.

    Returns:
        (R, S, S) uint8, rows before columns: 1 inside; 0 outside and for RoIs without an object.
    """
    device = object_R.device
    row_R = object_R.clamp(min=0)
    first_R = table.object_bounds[row_R].long()
    parts_R = torch.where(object_R >= 0, table.object_bounds[row_R + 1].long() - first_R, 0)
    roi_P, polygon_P = _enumerate(first_R, parts_R)
    begin_P = table.polygon_bounds[polygon_P].long()
    owner_E, point_E = _enumerate(begin_P, table.polygon_bounds[polygon_P + 1].long() - begin_P)
    end_E = table.polygon_bounds[polygon_P + 1].long()[owner_E]
    next_E = torch.where(point_E + 1 == end_E, begin_P[owner_E], point_E + 1)
    roi_E = roi_P[owner_E]
    boxes_E4, transform_E4 = boxes_R4[roi_E], transform_R4[roi_E]
    grid_E2 = _on_the_fine_grid(table.xy[point_E], boxes_E4, transform_E4, size)
    next_E2 = _on_the_fine_grid(table.xy[next_E], boxes_E4, transform_E4, size)
    passes_ES, row_ES = _crossings(grid_E2, next_E2, size)

    flips_PSS = torch.zeros((len(polygon_P), size, size + 1), dtype=torch.int32, device=device)  # columns before rows
    column_S = torch.arange(size, device=device)
    position_ES = (owner_E[:, None] * size + column_S) * (size + 1) + row_ES
    flips_PSS.view(-1).index_add_(0, position_ES.flatten(), passes_ES.flatten().int())
    inside_PSS = flips_PSS[:, :, :size].cumsum(2) % 2
    parts_RSS = torch.zeros((len(object_R), size, size), dtype=torch.int64, device=device)
    parts_RSS.index_add_(0, roi_P, inside_PSS)
    return (parts_RSS > 0).byte().transpose(1, 2).contiguous()


def _enumerate(first_N: Tensor, count_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return owner and number for all numbers ``first`` ... ``first + count - 1`` of each owner, sorted by owner."""
    owner = torch.repeat_interleave(torch.arange(len(count_N), device=count_N.device), count_N)
    before_N = count_N.cumsum(0) - count_N
    return owner, torch.arange(len(owner), device=count_N.device) - before_N[owner] + first_N[owner]


def _on_the_fine_grid(xy_E2: Tensor, boxes_E4: Tensor, transform_E4: Tensor, size: int) -> Tensor:
    """Return points of the published picture as float64 integers in the RoI's fine grid."""
    resized_E2 = xy_E2 * transform_E4[:, :2]
    width_E = (transform_E4[:, 3] * transform_E4[:, 0]).round()
    x_E = torch.where(transform_E4[:, 2] > 0, width_E - resized_E2[:, 0] - 1, resized_E2[:, 0])
    cut_E2 = torch.stack([x_E, resized_E2[:, 1]], 1) - boxes_E4[:, :2]
    extent_E2 = (boxes_E4[:, 2:] - boxes_E4[:, :2]).clamp(min=1)
    drawn_E2 = cut_E2 * (size / extent_E2.double()).float()
    return (drawn_E2.double() * FINER + 0.5).trunc()


def _crossings(start_E2: Tensor, end_E2: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return whether each edge crosses the middle of each column, and from which row, 0 ... S, it flips the column."""
    long_x_E = (end_E2 - start_E2).abs()
    along_x_E = long_x_E[:, 0] >= long_x_E[:, 1]
    backwards_E = torch.where(along_x_E, start_E2[:, 0] > end_E2[:, 0], start_E2[:, 1] > end_E2[:, 1])[:, None]
    (xs, ys), (xe, ye) = (
        torch.where(backwards_E, one, other).unsqueeze(2).unbind(1)  # (E, 1) each, against the columns
        for one, other in ((end_E2, start_E2), (start_E2, end_E2))
    )
    left_S = torch.arange(size, device=start_E2.device, dtype=torch.float64) * FINER + 2
    rising_E = xe > xs
    passes_ES = (torch.minimum(xs, xe) <= left_S) & (torch.maximum(xs, xe) > left_S)

    # For edges that are longer along x, y is computed for the steps on both sides of the middle.
    slope_E = (ye - ys) / (xe - xs).clamp(min=1)
    step_ES = left_S - xs
    row_along_x_ES = torch.minimum(ys + slope_E * step_ES + 0.5, ys + slope_E * (step_ES + 1) + 0.5)

    # For edges that are longer along y, x is computed: the first step after the middle. The quotient can have rounding
    # errors.
    slope_E = (xe - xs) / (ye - ys).clamp(min=1)
    guess_ES = ((left_S + 0.5 - xs) / torch.where(rising_E | (xe < xs), slope_E, 1)).floor()
    missed_ES = _before(xs, slope_E, guess_ES, left_S, rising_E)
    missed_again_ES = missed_ES & _before(xs, slope_E, guess_ES + 1, left_S, rising_E)
    row_along_y_ES = ys + guess_ES + missed_ES.double() + missed_again_ES.double() - 1

    row_ES = torch.where(along_x_E[:, None], row_along_x_ES, row_along_y_ES).clamp(0, FINER * size).long()
    return passes_ES, (row_ES + 2) // FINER


def _before(xs: Tensor, slope: Tensor, step: Tensor, left: Tensor, rising: Tensor) -> Tensor:
    """Return whether x has not yet crossed the middle of the column after ``step`` steps."""
    return (xs + slope * step + 0.5 >= left + 1) != rising


MASK_TARGETS = Operation(
    "mask_targets",
    mask_targets_reference,
    {
        "triton": triton_kernels(
            "benchmarks.maskrcnn.ops.mask_targets.triton:mask_targets", most={"size": MOST_ROWS}, dtypes=()
        ),
    },
    kernel_names=(("mask targets", r"^mask_targets_"),),
    cases="benchmarks.maskrcnn.ops.mask_targets.cases",
)
"""Signature: ``mask_targets(table, object_R, boxes_R4, transform_R4, size)``. A request has the size ``size``."""
