"""The two operations of an evaluation beside the network: adding a window's logits, and counting classes.

Sums are held as (D, H, W, K), so that a row of a window in ``channels_last_3d`` is added to one run of memory.
Windows are added one after another in stream order: overlapping ones don't race, and the sums of a rank are the same
in every run. Axes: D H W voxels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported

INTERSECTION, PREDICTED, LABELLED = range(3)
"""Columns of the counts of a class: voxels that are predicted and labelled as it, predicted, labelled."""


def add_window_torch(sums_DHWK: Tensor, logits_KDHW: Tensor, importance: Sequence[Tensor]) -> None:
    """Add the logits of a window, each voxel times its importance. Plain version.

    Args:
        sums_DHWK: where the window lies in the sums of its volume: a view, fp32 or fp64; W and K contiguous.
        logits_KDHW: of any floating dtype and strides.
        importance: factors (D,), (H,) and (W,) of the dtype of the sums.
    """
    d, h, w = importance
    weight_DHW1 = ((d[:, None, None] * h[:, None]) * w)[..., None]
    sums_DHWK += logits_KDHW.permute(1, 2, 3, 0).to(sums_DHWK.dtype) * weight_DHW1


def count_classes_torch(sums_DHWK: Tensor, label_DHW: Tensor, counts_K3: Tensor) -> None:
    """Add to the counts of every class; a voxel's prediction is the first of its largest sums. Plain version.

    Args:
        sums_DHWK: a view of sums; W and K contiguous.
        label_DHW: uint8, contiguous.
        counts_K3: int64; columns ``INTERSECTION``, ``PREDICTED`` and ``LABELLED``.
    """
    predicted_DHW = sums_DHWK.argmax(-1)
    for label, counts_3 in enumerate(counts_K3):
        predicted, labelled = predicted_DHW == label, label_DHW == label
        counts_3 += torch.stack([(predicted & labelled).sum(), predicted.sum(), labelled.sum()])


def _add_window_triton(*args: Any) -> None:
    # triton is imported only where it is used
    from benchmarks.unet3d.window_sums_triton import add_window

    add_window(*args)


def _count_classes_triton(*args: Any) -> None:
    from benchmarks.unet3d.window_sums_triton import count_classes

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
