"""Loss of the mask head: of all its logits, those for the class of a region's object alone count.

He et al., arXiv:1703.06870, section 3: the binary cross-entropy of every pixel, the mean over all pixels of all regions
that have an object. Nothing else of the logits is read, and backward writes the whole gradient, which is zero but for
that channel, in one pass.

Legend: R regions, K channels, H W height and width of a mask.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.maskrcnn.ops.mask_loss.plain import mask_loss_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _mask_loss_triton(logits_RKHW: Tensor, target_RHW: Tensor, class_R: Tensor) -> Tensor:
    from benchmarks.maskrcnn.ops.mask_loss.triton import mask_loss  # triton is imported only where it is used

    return mask_loss(logits_RKHW, target_RHW, class_R)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _mask_loss_triton, triton_unsupported),
    "torch": Implementation("torch", mask_loss_torch, always),
}
"""Signature: ``mask_loss(logits_RKHW, target_RHW, class_R)``."""

KERNEL_NAMES = (("mask loss", r"^mask_loss_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
