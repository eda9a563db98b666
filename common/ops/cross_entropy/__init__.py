"""Cross-entropy of masked tokens over the vocabulary, and whether each is predicted right.

The word table is padded, so logits have more columns than words: those never count, neither in the softmax nor in the
argmax. Rows without a label (-1) have loss 0, gradient 0, and are not correct, whatever their logits are.

Where each of several ranks has the logits of some words, the pair of :data:`OF_A_PART` serves, without autograd: each
rank's log-sum-exp, from which all together make that of all words, and with that the gradient of each one's logits.
"""

from __future__ import annotations

from common.ops.cross_entropy.reference import (
    OfAPart,
    gradient_reference,
    log_sum_exp_reference,
    masked_cross_entropy_reference,
)
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

CROSS_ENTROPY = Operation(
    "cross_entropy",
    masked_cross_entropy_reference,
    {
        "triton": triton_kernels("common.ops.cross_entropy.triton:masked_cross_entropy"),
    },
    kernel_names=(("cross-entropy", r"^cross_entropy_"),),
    cases="common.ops.cross_entropy.cases",
)
"""Signature: ``masked_cross_entropy(logits_MV, labels_M, vocabulary, inplace=False)``."""

OF_A_PART = Operation(
    "cross_entropy_of_a_part",
    OfAPart(log_sum_exp_reference, gradient_reference),
    {
        "triton": triton_kernels("common.ops.cross_entropy.triton"),
    },
    cases="common.ops.cross_entropy.cases:OF_A_PART",
)
"""Functions: :class:`OfAPart`."""
