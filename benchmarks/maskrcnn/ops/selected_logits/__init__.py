"""The mask head's last layer, only for the class of each region's object.

The loss uses one channel of the 1x1 convolution to all classes. This operation multiplies a region's pixels only by
the weight row of that class: 1 / K of the products, and no tensor of K channels in either direction. Slots without an
object are not read.

Legend: R regions, P pixels of a region, in any order, C channels, K classes with background.
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.selected_logits.reference import selected_logits_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

MOST_CHANNELS = 2048
"""Maximum number of channels, which a program holds for a pixel at once."""


SELECTED_LOGITS = Operation(
    "selected_logits",
    selected_logits_reference,
    {
        "triton": triton_kernels(
            "benchmarks.maskrcnn.ops.selected_logits.triton:selected_logits", most={"channels": MOST_CHANNELS}
        ),
    },
    kernel_names=(("mask logits", r"^selected_logits_"),),
    cases="benchmarks.maskrcnn.ops.selected_logits.cases",
)
"""Signature: ``selected_logits(x_RPC, weight_KC, bias_K, class_R)``. A request has the size ``channels``."""
