"""Two steps of an evaluation besides the network: adding the logits of a window, and counting classes.

Sums are stored as (D, H, W, K), so a row of a ``channels_last_3d`` window is added to contiguous memory. Windows are
added one by one in stream order, so overlapping windows do not race and the sums of a rank are reproducible. Nothing
waits for the device. Axes: D H W voxels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTERSECTION, PREDICTED, LABELLED = range(3)
"""Columns of the counts of a class: voxels that are both predicted and labelled, predicted, labelled."""


def add_window(sums_DHWK: Tensor, logits_KDHW: Tensor, importance: Sequence[Tensor]) -> None:
    """Add the logits of a window, multiplied by the importance of each voxel.

    Args:
        sums_DHWK: view of the volume's sums at the window, fp32 or fp64.
        logits_KDHW: any floating-point dtype and strides.
        importance: factors (D,), (H,) and (W,), in the dtype of the sums.
    """
    d, h, w = importance
    weight_DHW1 = ((d[:, None, None] * h[:, None]) * w)[..., None]
    sums_DHWK += logits_KDHW.permute(1, 2, 3, 0).to(sums_DHWK.dtype) * weight_DHW1


def count_classes(sums_DHWK: Tensor, label_DHW: Tensor, counts_K3: Tensor) -> None:
    """Add the voxels of every class to its counts; the prediction of a voxel is the first class with the largest sum.

    Args:
        sums_DHWK: may be a view.
        label_DHW: uint8.
        counts_K3: int64; columns ``INTERSECTION``, ``PREDICTED`` and ``LABELLED``.
    """
    predicted_DHW = sums_DHWK.argmax(-1)
    for label, counts_3 in enumerate(counts_K3):
        predicted, labelled = predicted_DHW == label, label_DHW == label
        counts_3 += torch.stack([(predicted & labelled).sum(), predicted.sum(), labelled.sum()])
