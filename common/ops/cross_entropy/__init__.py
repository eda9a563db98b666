"""Cross-entropy of masked tokens over the vocabulary, and whether each is predicted right.

The word table is padded, so logits have more columns than words: those never count, neither in the softmax nor in the
argmax. Rows without a label (-1) have loss 0, gradient 0, and are not correct, whatever their logits are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.cross_entropy.plain import masked_cross_entropy_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _masked_cross_entropy_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    # triton is imported only where it is used
    from common.ops.cross_entropy.triton import masked_cross_entropy

    return masked_cross_entropy(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _masked_cross_entropy_triton, triton_unsupported),
    "torch": Implementation("torch", masked_cross_entropy_torch, always),
}
"""Signature: ``masked_cross_entropy(logits_MV, labels_M, vocabulary, inplace=False)``."""

KERNEL_NAMES = (("cross-entropy", r"^cross_entropy_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
