"""The mask head's last layer for the class of each region's object alone.

The loss looks at one of the channels that a 1x1 convolution to all classes gives. Here a region's pixels meet the one
row of the weight that they need: 1 / K of the products, and no tensor of K channels either way. Slots without an object
are not read.

Legend: R regions, P pixels of a region, in any order, C channels, K classes with background.
"""

from __future__ import annotations

from benchmarks.maskrcnn.ops.selected_logits.reference import selected_logits_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

MOST_CHANNELS = 2048
"""What a program holds of a pixel at once."""


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
"""Signature: ``selected_logits(x_RPC, weight_KC, bias_K, class_R)``. Sizes of a request: ``channels``."""
