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
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.mask_targets.reference import MOST_ROWS, mask_targets_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

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
