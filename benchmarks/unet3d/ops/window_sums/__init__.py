"""The two operations of an evaluation beside the network: adding a window's logits, and counting classes.

Sums are held as (D, H, W, K), so that a row of a window in ``channels_last_3d`` is added to one run of memory.
Windows are added one after another in stream order: overlapping ones don't race, and the sums of a rank are the same
in every run. Axes: D H W voxels, K classes.
"""

from __future__ import annotations

from benchmarks.unet3d.ops.window_sums.reference import add_window_reference, count_classes_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

ADD_WINDOW = Operation(
    "add_window",
    add_window_reference,
    {
        "triton": triton_kernels("benchmarks.unet3d.ops.window_sums.triton:add_window"),
    },
    kernel_names=(("adding windows", r"^add_window_"), ("counting classes", r"^count_classes_")),
    cases="benchmarks.unet3d.ops.window_sums.cases:ADD_WINDOW",
)
"""Signature: ``add_window(sums_DHWK, logits_KDHW, importance)``."""
COUNT_CLASSES = Operation(
    "count_classes",
    count_classes_reference,
    {
        "triton": triton_kernels("benchmarks.unet3d.ops.window_sums.triton:count_classes"),
    },
    cases="benchmarks.unet3d.ops.window_sums.cases:COUNT_CLASSES",
)
"""Signature: ``count_classes(sums_DHWK, label_DHW, counts_K3)``."""
