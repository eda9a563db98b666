"""The plain version of :mod:`benchmarks.maskrcnn.ops.mask_loss`, and what both have in common."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen


def pixels_that_count(class_R: Tensor, pixels: int) -> Tensor:
    """Of all regions with an object, each with so many, as a divisor: at least 1; 0-d."""
    return ((class_R >= 0).sum() * pixels).clamp(min=1)


def check(logits_RKHW: Tensor, target_RHW: Tensor, class_R: Tensor) -> None:
    """Refuse what does not fit together.

    Raises:
        ValueError: the shapes don't.
    """
    regions, _, height, width = logits_RKHW.shape
    if target_RHW.shape != (regions, height, width) or class_R.shape != (regions,):
        raise ValueError(
            f"logits {tuple(logits_RKHW.shape)}, targets {tuple(target_RHW.shape)} and classes {tuple(class_R.shape)} "
            "don't fit"
        )


def mask_loss_torch(logits_RKHW: Tensor, target_RHW: Tensor, class_R: Tensor) -> Tensor:
    """Plain version.

    Args:
        logits_RKHW: of the mask head.
        target_RHW: 1 where the object is and 0 elsewhere, uint8.
        class_R: channel that counts, int64; -1 where a slot holds no region with an object.

    Returns:
        The mean over all pixels of the regions with an object, 0-d, fp32 (fp64 of fp64); 0 without any.

    Raises:
        ValueError: the shapes don't fit.
    """
    check(logits_RKHW, target_RHW, class_R)
    known_R1HW = class_R.clamp(min=0)[:, None, None, None].expand(-1, 1, *logits_RKHW.shape[2:])
    logits_RHW = widen(logits_RKHW.gather(1, known_R1HW).squeeze(1))
    entropy_RHW = F.binary_cross_entropy_with_logits(logits_RHW, target_RHW.to(logits_RHW.dtype), reduction="none")
    total = torch.where((class_R >= 0)[:, None, None], entropy_RHW, 0.0).sum()
    return total / pixels_that_count(class_R, target_RHW[:1].numel())
