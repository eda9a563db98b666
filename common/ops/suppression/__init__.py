"""Non-maximum suppression of many pictures at fixed shapes, without waiting for the device."""

from __future__ import annotations

from common.ops.operation import Operation
from common.ops.suppression.reference import suppress_reference
from common.ops.triton_support import triton_kernels

SUPPRESSION = Operation(
    "suppression",
    suppress_reference,
    {
        "triton": triton_kernels("common.ops.suppression.triton:suppress"),
    },
    kernel_names=(("suppression", r"^suppression_"),),
    cases="common.ops.suppression.cases",
)
"""Signature: ``suppress(boxes_BN4, score_BN, class_BN, threshold, keep, pixel, presorted)``. The dtype of a request is
that of the boxes."""
