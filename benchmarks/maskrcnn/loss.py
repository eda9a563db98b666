"""Losses of both stages in fixed slots. Counts stay on the device, nothing waits, and no index depends on values.

Ren et al., arXiv:1506.01497, section 3.1.2, and He et al., arXiv:1703.06870, section 3, as in the MLPerf reference:
means and quotients are over the whole micro-batch, and losses of offsets are divided by the size of the sample, not by
the number of positives.

Shapes: B pictures, L levels, A anchors of all levels, N slots for sampled anchors, R slots for sampled proposals of a
picture, K classes, Q slots for masks of all pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.maskrcnn.model import RpnOutput
from benchmarks.maskrcnn.targets import RoiSample, RpnSample
from common.ops.triton_support import widen


def rpn_losses(levels: Sequence[RpnOutput], sample: RpnSample, beta: float) -> tuple[Tensor, Tensor]:
    """Return the losses of the region proposal network, 0-d, fp32 (fp64 for fp64 outputs).

    Args:
        sample: sampled anchors.
        beta: distance at which the smooth L1 loss becomes linear.

    Returns:
        Mean binary cross-entropy of the sampled anchors (object or not), and smooth L1 loss of the positives' offsets,
        summed and divided by the number of sampled anchors. Both are 0 for an empty sample.
    """
    flat = [level.flat() for level in levels]
    logits_BA, deltas_BA4 = (torch.cat(parts, 1) for parts in zip(*flat, strict=True))
    # Indexing instead of gather: with deterministic sums, the gradient of gather copies from the host.
    position_BN = _numbers(logits_BA).unsqueeze(1), sample.index_BN
    logits_BN, deltas_BN4 = widen(logits_BA[position_BN]), widen(deltas_BA4[position_BN])
    positive_BN, sampled_BN = (
        first_slots(count_B, sample.index_BN.shape[1]) for count_B in (sample.positives_B, sample.total_B)
    )
    sampled = _at_least_one(sample.total_B, logits_BN.dtype)
    entropy_BN = F.binary_cross_entropy_with_logits(logits_BN, positive_BN.to(logits_BN.dtype), reduction="none")
    objectness = torch.where(sampled_BN, entropy_BN, 0.0).sum() / sampled
    return objectness, _smooth_l1(deltas_BN4, sample.offsets_BN4, positive_BN, beta) / sampled


def box_losses(logits_RK: Tensor, deltas_RC: Tensor, sample: RoiSample, beta: float) -> tuple[Tensor, Tensor]:
    """Return the losses of the box head, 0-d, fp32 (fp64 for fp64 outputs).

    Args:
        logits_RK: (B R, K + 1), background first, sorted by picture.
        deltas_RC: (B R, 4 (K + 1)), offsets of the boxes of background and all classes.
        sample: sampled proposals.
        beta: distance at which the smooth L1 loss becomes linear.

    Returns:
        Mean cross-entropy of the sampled proposals, and smooth L1 loss of the positives' offsets for the class of
        their object, summed and divided by the number of sampled proposals. Both are 0 for an empty sample.
    """
    logits_RK, label_R = widen(logits_RK), sample.label_BR.flatten()
    sampled = _at_least_one(sample.total_B, logits_RK.dtype)
    classes = F.cross_entropy(logits_RK, label_R, ignore_index=-1, reduction="sum") / sampled
    deltas_R4 = widen(deltas_RC.unflatten(1, (-1, 4))[_numbers(label_R), label_R.clamp(min=0)])
    positive_BR = first_slots(sample.positives_B, sample.label_BR.shape[1])
    boxes = _smooth_l1(deltas_R4.view_as(sample.offsets_BR4), sample.offsets_BR4, positive_BR, beta)
    return classes, boxes / sampled


def mask_loss(logits_QHW: Tensor, target_QHW: Tensor, class_Q: Tensor) -> Tensor:
    """Return the loss of the mask head, 0-d, fp32 (fp64 for fp64 logits) (He et al., section 3).

    Args:
        logits_QHW: logits of each slot for the class of its object.
        target_QHW: 1 inside the object and 0 outside, uint8.
        class_Q: -1 for slots without a region with an object.

    Returns:
        Mean binary cross-entropy over all pixels of regions with an object, or 0 without any.
    """
    logits_QHW, valid_Q = widen(logits_QHW), class_Q >= 0
    entropy_QHW = F.binary_cross_entropy_with_logits(logits_QHW, target_QHW.to(logits_QHW.dtype), reduction="none")
    pixels = _at_least_one(valid_Q * target_QHW[:1].numel(), logits_QHW.dtype)
    return torch.where(valid_Q[:, None, None], entropy_QHW, 0.0).sum() / pixels


def first_slots(count_B: Tensor, slots: int) -> Tensor:
    """Return (B, slots) bool: the first ``count_B`` slots of each picture."""
    return torch.arange(slots, device=count_B.device) < count_B.unsqueeze(1)


def _numbers(rows: Tensor) -> Tensor:
    """Return the indices of the rows."""
    return torch.arange(len(rows), device=rows.device)


def _at_least_one(count_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``count_B``, at least 1, as a divisor."""
    return count_B.sum().clamp(min=1).to(dtype)


def _smooth_l1(deltas_BN4: Tensor, target_BN4: Tensor, counts_BN: Tensor, beta: float) -> Tensor:
    """Return the sum of the smooth L1 loss over the slots in ``counts_BN``."""
    distance_BN4 = F.smooth_l1_loss(deltas_BN4, target_BN4.to(deltas_BN4.dtype), beta=beta, reduction="none")
    return torch.where(counts_BN.unsqueeze(2), distance_BN4, 0.0).sum()
