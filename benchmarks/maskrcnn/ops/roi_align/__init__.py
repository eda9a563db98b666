"""RoIAlign on the four finest levels of the pyramid at once, for one or two sets of regions.

He et al., arXiv:1703.06870, section 3, as in the reference: without the later half-pixel shift (``aligned=False`` in
torchvision), so that a region starts at ``x1 * scale`` and is ``max((x2 - x1) * scale, 1)`` wide. A region is taken
from level ``floor(4 + log2(sqrt(area) / 224 + 1e-6))``, clamped to 2 ... 5 (Lin et al., arXiv:1612.03144, section
4.2), with the legacy area ``(x2 - x1 + 1) (y2 - y1 + 1)``. Slots without a region give zeros, have no gradient and
read nothing. Boxes have no gradient.

Box head and mask head use regions of the same levels. If both sets are passed together, they share one backward pass,
which writes the gradient of each level once in its own dtype, without an fp32 buffer and without adding two gradients.

Shapes: B pictures, R regions of a picture, C channels, S bins along each side of a region.
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.roi_align.reference import Regions, RoiAlign, roi_align_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

__all__ = ["ROI_ALIGN", "Regions", "RoiAlign"]


ROI_ALIGN = Operation(
    "roi_align",
    roi_align_reference,
    {
        "triton": triton_kernels("benchmarks.maskrcnn.ops.roi_align.triton:roi_align"),
    },
    kernel_names=(("RoIAlign", r"^roi_align_"),),
    cases="benchmarks.maskrcnn.ops.roi_align.cases",
)
"""Signature: :data:`RoiAlign`."""
