"""RoIAlign over the four finest levels of the pyramid at once, for one set of regions or for two.

He et al., arXiv:1703.06870, section 3, as the reference has it: without the half-pixel shift that came later, which is
``aligned=False`` with torchvision, so that a region starts at ``x1 * scale`` and is ``max((x2 - x1) * scale, 1)`` wide.
A region is taken from level ``floor(4 + log2(sqrt(area) / 224 + 1e-6))``, at least 2 and at most 5 (Lin et al.,
arXiv:1612.03144, section 4.2), with the legacy area ``(x2 - x1 + 1) (y2 - y1 + 1)``. Slots without a region give zeros,
have no gradient and read nothing. Boxes have no gradient.

Box head and mask head take their regions from the same levels. Passed together they share one backward pass, which
writes the gradient of each level once, in its own dtype: no buffer in fp32, no addition of two gradients.

Legend: B pictures, R regions of a picture, C channels, S bins along each side of a region.
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.roi_align.reference import Regions, RoiAlign, roi_align_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

__all__ = ["ROI_ALIGN", "Regions", "RoiAlign"]


ROI_ALIGN = Operation(
    "roi_align",
    RoiAlign(roi_align_reference),
    {
        "triton": triton_kernels("benchmarks.maskrcnn.ops.roi_align.triton:ROI_ALIGN"),
    },
    kernel_names=(("RoIAlign", r"^roi_align_"),),
    cases="benchmarks.maskrcnn.ops.roi_align.cases",
)
"""Functions: :class:`RoiAlign`, called itself for one set of regions, ``several`` for two."""
