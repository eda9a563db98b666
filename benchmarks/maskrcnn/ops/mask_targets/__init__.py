"""Mask targets: the outline of each RoI's object, cut to the RoI and drawn at the mask head's resolution.

What is drawn is what the reference draws, bit for bit. Its steps, in fp32 as it takes them, move a point of the
published picture to the RoI's raster of ``size`` x ``size``:

1. the resized picture: times the scale; where it is mirrored x becomes W - x - 1, W being its width in px;
2. the RoI: minus its first corner;
3. the raster: times size / max(x2 - x1, 1), without the 1 that legacy widths have otherwise.

COCO's rasteriser (``rleFrPoly`` of its mask API) takes the points from there in float64. It rounds them to a grid five
times as fine, walks along every edge in unit steps of the axis along which it is longer, and notes the first row below
the line wherever the line passes the middle of a column of the raster, which is between 5 n + 2 and 5 n + 3 on the fine
grid. From there on down the column what was outside is inside and the other way round. The parts of an object are
joined.

The reference and the Triton kernel draw without walking. An edge passes the middle of a column once at most, at a step
that follows from its slope, and the same float64 expression in the same order of operations, nothing fused, gives that
step's row.
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
"""Signature: ``mask_targets(table, object_R, boxes_R4, transform_R4, size)``; a request's sizes have ``size``."""
