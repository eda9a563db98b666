"""The end of every sub-layer of a post-norm transformer: ``LayerNorm(residual + dropout(x + bias))``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root.

Between FP8 matrix products the kernels write the result in FP8 and, for the residual connection, in 16 bits, and the
gradient of ``x`` only in FP8, with delayed scales (:mod:`common.ops.fp8_cast`). They do not write transposes.
"""

from __future__ import annotations

from common.ops.dropout_add_norm.reference import dropout_add_norm_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

DROPOUT_ADD_NORM = Operation(
    "dropout_add_norm",
    dropout_add_norm_reference,
    {
        "triton": triton_kernels("common.ops.dropout_add_norm.triton:dropout_add_norm"),
    },
    kernel_names=(("dropout and layer norm", r"^dropout_add_norm_"),),
    cases="common.ops.dropout_add_norm.cases",
)
"""Signature: ``dropout_add_norm(x, bias, residual, weight, norm_bias, epsilon, dropout, twice=False, *, fp8=None,
handover=None)``."""
