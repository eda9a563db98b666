"""The losses of both stages on fixed slots, their counts on the device: nothing waits, no index depends on values.

Ren et al., arXiv:1506.01497, section 3.1.2, and He et al., arXiv:1703.06870, section 3, as the MLPerf reference
computes them: all means and quotients are over the whole micro-batch, and the offsets' losses are divided by all that
was sampled, not by the positives.

Shapes: B pictures, L levels, A anchors of all levels, N slots for sampled anchors, R for sampled proposals of a
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
    """The losses of the region proposal network, 0-d; in fp32, in fp64 of fp64.

    Args:
        levels: what it says at every anchor.
        sample: anchors that count.
        beta: where the smooth L1 loss becomes linear.

    Returns:
        Binary cross-entropy of whether there is an object, the mean over all sampled anchors; and the smooth L1 loss of
        the positives' offsets, whose sum is divided by the number of all sampled anchors. 0 without any.
    """
    flat = [level.flat() for level in levels]
    logits_BA, deltas_BA4 = (torch.cat(parts, 1) for parts in zip(*flat, strict=True))
    # Indexed, not gathered: the gradient of a gather copies from the host where sums are to have a fixed order.
    place_BN = _numbers(logits_BA).unsqueeze(1), sample.index_BN
    logits_BN, deltas_BN4 = widen(logits_BA[place_BN]), widen(deltas_BA4[place_BN])
    positive_BN, sampled_BN = (
        first_slots(count_B, sample.index_BN.shape[1]) for count_B in (sample.positives_B, sample.total_B)
    )
    sampled = _at_least_one(sample.total_B, logits_BN.dtype)
    entropy_BN = F.binary_cross_entropy_with_logits(logits_BN, positive_BN.to(logits_BN.dtype), reduction="none")
    objectness = torch.where(sampled_BN, entropy_BN, 0.0).sum() / sampled
    return objectness, _smooth_l1(deltas_BN4, sample.offsets_BN4, positive_BN, beta) / sampled


def box_losses(logits_RK: Tensor, deltas_RC: Tensor, sample: RoiSample, beta: float) -> tuple[Tensor, Tensor]:
    """The losses of the box head, 0-d; in fp32, in fp64 of fp64.

    Args:
        logits_RK: (B R, K + 1), of background and classes, picture by picture.
        deltas_RC: (B R, 4 (K + 1)), offsets for each of them.
        sample: proposals that count.
        beta: where the smooth L1 loss becomes linear.

    Returns:
        Cross-entropy of the classes, the mean over all sampled proposals; and the smooth L1 loss of the positives'
        offsets for the class of their object, whose sum is divided by the number of all sampled proposals. 0 without
        any.
    """
    logits_RK, label_R = widen(logits_RK), sample.label_BR.flatten()
    sampled = _at_least_one(sample.total_B, logits_RK.dtype)
    classes = F.cross_entropy(logits_RK, label_R, ignore_index=-1, reduction="sum") / sampled
    deltas_R4 = widen(deltas_RC.unflatten(1, (-1, 4))[_numbers(label_R), label_R.clamp(min=0)])
    positive_BR = first_slots(sample.positives_B, sample.label_BR.shape[1])
    boxes = _smooth_l1(deltas_R4.view_as(sample.offsets_BR4), sample.offsets_BR4, positive_BR, beta)
    return classes, boxes / sampled


def mask_loss(logits_QHW: Tensor, target_QHW: Tensor, class_Q: Tensor) -> Tensor:
    """The loss of the mask head, 0-d; in fp32, in fp64 of fp64 (He et al., section 3).

    Args:
        logits_QHW: of each slot, for the class of its object.
        target_QHW: 1 where the object is and 0 elsewhere, uint8.
        class_Q: -1 where a slot holds no region with an object.

    Returns:
        Binary cross-entropy, the mean over all pixels of the regions with an object; 0 without any.
    """
    logits_QHW, there_Q = widen(logits_QHW), class_Q >= 0
    entropy_QHW = F.binary_cross_entropy_with_logits(logits_QHW, target_QHW.to(logits_QHW.dtype), reduction="none")
    pixels = _at_least_one(there_Q * target_QHW[:1].numel(), logits_QHW.dtype)
    return torch.where(there_Q[:, None, None], entropy_QHW, 0.0).sum() / pixels


def first_slots(count_B: Tensor, slots: int) -> Tensor:
    """(B, slots) bool: the first ``count_B`` slots of each picture."""
    return torch.arange(slots, device=count_B.device) < count_B.unsqueeze(1)


def _numbers(rows: Tensor) -> Tensor:
    """Of the rows, from 0."""
    return torch.arange(len(rows), device=rows.device)


def _at_least_one(count_B: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of ``count_B`` as a divisor."""
    return count_B.sum().clamp(min=1).to(dtype)


def _smooth_l1(deltas_BN4: Tensor, target_BN4: Tensor, counts_BN: Tensor, beta: float) -> Tensor:
    """The sum over the slots that count."""
    distance_BN4 = F.smooth_l1_loss(deltas_BN4, target_BN4.to(deltas_BN4.dtype), beta=beta, reduction="none")
    return torch.where(counts_BN.unsqueeze(2), distance_BN4, 0.0).sum()
