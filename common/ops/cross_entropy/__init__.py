"""Cross-entropy of masked tokens over the vocabulary, and whether each prediction is correct.

The word table is padded, so logits have more columns than there are words. Softmax and argmax ignore the padding. Rows
without a label (-1) have loss 0 and gradient 0 and are not correct, whatever their logits are.

If the vocabulary is sharded over ranks, use the two functions of :data:`OF_A_PART`, which have no autograd. The first
returns the log-sum-exp of the words of a rank, and the caller merges those of all ranks; with the result, the second
returns the gradient of the logits of a rank.
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
"""Functions: those of :class:`OfAPart`."""
