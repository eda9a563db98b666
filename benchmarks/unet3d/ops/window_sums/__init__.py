"""The two operations of an evaluation beside the network: adding a window's logits, and counting classes.

Sums are held as (D, H, W, K), so that a row of a window in ``channels_last_3d`` is added to one run of memory.
Windows are added one after another in stream order: overlapping ones don't race, and the sums of a rank are the same
in every run. Axes: D H W voxels, K classes.
"""

from __future__ import annotations

from typing import Any

from benchmarks.unet3d.ops.window_sums.plain import add_window_torch, count_classes_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _add_window_triton(*args: Any) -> None:
    # triton is imported only where it is used
    from benchmarks.unet3d.ops.window_sums.triton import add_window

    add_window(*args)


def _count_classes_triton(*args: Any) -> None:
    from benchmarks.unet3d.ops.window_sums.triton import count_classes

    count_classes(*args)


ADD_WINDOW = {
    "triton": Implementation("triton", _add_window_triton, triton_unsupported),
    "torch": Implementation("torch", add_window_torch, always),
}
"""Signature: ``add_window(sums_DHWK, logits_KDHW, importance)``."""
COUNT_CLASSES = {
    "triton": Implementation("triton", _count_classes_triton, triton_unsupported),
    "torch": Implementation("torch", count_classes_torch, always),
}
"""Signature: ``count_classes(sums_DHWK, label_DHW, counts_K3)``."""

KERNEL_NAMES = (("adding windows", r"^add_window_"), ("counting classes", r"^count_classes_"))
"""Kind of work and pattern of the kernels' names, for the breakdown of an evaluation."""
