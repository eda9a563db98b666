"""Match every anchor of a picture to the ground-truth box that it has to predict.

Ren et al., arXiv:1506.01497, section 3.1.2 (thresholds, and the best anchors of a box that no anchor overlaps enough);
Liu et al., arXiv:1512.02325, section 2.2 (rule of SSD).
"""

from __future__ import annotations

from common.ops.anchor_matching.reference import match_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

ANCHOR_MATCHING = Operation(
    "anchor_matching",
    match_reference,
    {
        "triton": triton_kernels("common.ops.anchor_matching.triton:match", dtypes=()),
    },
    kernel_names=(("matching", r"^anchor_matching_"),),
    cases="common.ops.anchor_matching.cases",
)
"""Signature: that of :func:`match_reference`. Arithmetic is always fp32, so all implementations agree exactly."""
