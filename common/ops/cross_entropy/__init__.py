"""Cross-entropy of masked tokens over the vocabulary, and whether each is predicted right.

The word table is padded, so logits have more columns than words: those never count, neither in the softmax nor in the
argmax. Rows without a label (-1) have loss 0, gradient 0, and are not correct, whatever their logits are.

Where each of several ranks has the logits of some words, the pair of :data:`OF_A_PART` serves, without autograd: each
rank's log-sum-exp, from which all together make that of all words, and with that the gradient of each one's logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.cross_entropy.plain import OfAPart, gradient_torch, log_sum_exp_torch, masked_cross_entropy_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _masked_cross_entropy_triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    # triton is imported only where it is used
    from common.ops.cross_entropy.triton import masked_cross_entropy

    return masked_cross_entropy(*args, **kwargs)


def _log_sum_exp_triton(*args: Any) -> Tensor:
    from common.ops.cross_entropy.triton import log_sum_exp  # triton is imported only where it is used

    return log_sum_exp(*args)


def _gradient_triton(*args: Any) -> Tensor:
    from common.ops.cross_entropy.triton import gradient  # triton is imported only where it is used

    return gradient(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _masked_cross_entropy_triton, triton_unsupported),
    "torch": Implementation("torch", masked_cross_entropy_torch, always),
}
"""Signature: ``masked_cross_entropy(logits_MV, labels_M, vocabulary, inplace=False)``."""

OF_A_PART = {
    "triton": Implementation("triton", OfAPart(_log_sum_exp_triton, _gradient_triton), triton_unsupported),
    "torch": Implementation("torch", OfAPart(log_sum_exp_torch, gradient_torch), always),
}
"""Functions: :class:`OfAPart`."""

KERNEL_NAMES = (("cross-entropy", r"^cross_entropy_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
