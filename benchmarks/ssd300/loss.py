"""SSD's loss with hard-negative mining, for captured graphs: fixed shapes and no indexing that depends on values.

Liu et al., arXiv:1512.02325, section 2.2, as in the MLPerf reference. Shapes: N pictures, A default boxes, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ssd300.targets import BACKGROUND


@dataclass(frozen=True)
class DetectionLosses:
    """Means over the pictures, 0-d, of the loss and its two parts."""

    total: Tensor
    boxes: Tensor
    classes: Tensor


def multibox_loss(
    logits_NAK: Tensor,
    offsets_NA4: Tensor,
    class_NA: Tensor,
    target_NA4: Tensor,
    negatives: int,
) -> DetectionLosses:
    """Return smooth L1 of the positives' offsets plus cross-entropy of positives and hard negatives, per positive.

    The loss of a picture is divided by its number of positives, which are default boxes with a matched box. Hard
    negatives are the ``negatives`` times as many negatives with the largest cross-entropy, the first of equals. A
    picture without positives adds 0 to the mean over the pictures.

    Args:
        logits_NAK: predicted logits, background first. Arithmetic is fp32, or fp64 for fp64 logits.
        offsets_NA4: predicted offsets.
        class_NA: target classes, int64; 0 is background.
        target_NA4: target offsets; those of background are ignored.
        negatives: hard negatives per positive.
    """
    dtype = torch.promote_types(logits_NAK.dtype, torch.float32)
    entropy_NA = -F.log_softmax(logits_NAK, 2, dtype=dtype).gather(2, class_NA.unsqueeze(2)).squeeze(2)
    positive_NA = class_NA != BACKGROUND
    positives_N = positive_NA.sum(1)
    counts_NA = positive_NA | _hardest(entropy_NA, positive_NA, negatives * positives_N)
    classes_N = torch.where(counts_NA, entropy_NA, 0.0).sum(1)

    distance_NA = F.smooth_l1_loss(offsets_NA4.to(dtype), target_NA4.to(dtype), reduction="none").sum(2)
    boxes_N = torch.where(positive_NA, distance_NA, 0.0).sum(1)

    share_N = torch.where(positives_N > 0, positives_N.clamp(min=1).to(dtype).reciprocal(), 0.0)
    boxes, found = (boxes_N * share_N).mean(), (classes_N * share_N).mean()
    return DetectionLosses(boxes + found, boxes, found)


@torch.no_grad()
def _hardest(entropy_NA: Tensor, positive_NA: Tensor, count_N: Tensor) -> Tensor:
    """Return (N, A) bool: the ``count_N`` negatives of each picture with the largest cross-entropy."""
    order_NA = entropy_NA.masked_fill(positive_NA, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    place_A = torch.arange(order_NA.shape[1], device=order_NA.device)
    rank_NA = torch.empty_like(order_NA).scatter_(1, order_NA, place_A.expand_as(order_NA))
    return (rank_NA < count_N.unsqueeze(1)) & ~positive_NA
