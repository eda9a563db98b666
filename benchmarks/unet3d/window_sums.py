"""The two steps of an evaluation beside the network: adding a window's logits, and counting classes.

Sums are held as (D, H, W, K), so a row of a window in ``channels_last_3d`` is added to contiguous memory. Windows are
added one after another in stream order: overlapping ones do not race, and a rank's sums are the same in every run.
Nothing waits for the device. Axes: D H W voxels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTERSECTION, PREDICTED, LABELLED = range(3)
"""Columns of the counts of a class: voxels that are predicted and labelled as it, predicted, labelled."""


def add_window(sums_DHWK: Tensor, logits_KDHW: Tensor, importance: Sequence[Tensor]) -> None:
    """Add the logits of a window, each voxel times its importance.

    Args:
        sums_DHWK: view of the volume's sums at the window, fp32 or fp64.
        logits_KDHW: any floating dtype and strides.
        importance: factors (D,), (H,) and (W,) of the dtype of the sums.
    """
    d, h, w = importance
    weight_DHW1 = ((d[:, None, None] * h[:, None]) * w)[..., None]
    sums_DHWK += logits_KDHW.permute(1, 2, 3, 0).to(sums_DHWK.dtype) * weight_DHW1


def count_classes(sums_DHWK: Tensor, label_DHW: Tensor, counts_K3: Tensor) -> None:
    """Add to the counts of every class; a voxel's prediction is the first of its largest sums.

    Args:
        sums_DHWK: a view of sums.
        label_DHW: uint8.
        counts_K3: int64; columns ``INTERSECTION``, ``PREDICTED`` and ``LABELLED``.
    """
    predicted_DHW = sums_DHWK.argmax(-1)
    for label, counts_3 in enumerate(counts_K3):
        predicted, labelled = predicted_DHW == label, label_DHW == label
        counts_3 += torch.stack([(predicted & labelled).sum(), predicted.sum(), labelled.sum()])
