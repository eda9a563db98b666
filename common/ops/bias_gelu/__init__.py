"""GELU of a matrix product and its bias, in the tanh form that BERT was trained with.

``0.5 z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))`` with z = x + bias: Hendrycks, Gimpel, arXiv:1606.08415, section 2.

Between two FP8 matrix products the kernels write the result and the gradient in FP8, rounded once from the fp32
arithmetic, with delayed scales (:mod:`common.ops.fp8_cast`).

There is a function with autograd, and a pair of functions for callers with a hand-written backward pass. These keep
``saved`` for backward: x itself, or z in e4m3.
"""

from __future__ import annotations

from common.ops.bias_gelu.reference import BiasGelu, backward_reference, bias_gelu_reference, forward_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

BIAS_GELU = Operation(
    "bias_gelu",
    bias_gelu_reference,
    {
        "triton": triton_kernels("common.ops.bias_gelu.triton:bias_gelu"),
    },
    kernel_names=(("GELU", r"^bias_gelu_"),),
    cases="common.ops.bias_gelu.cases",
)
"""Signature: ``bias_gelu(x_TF, bias_F, *, fp8=None, handover=None)``."""

BIAS_GELU_PASSES = Operation(
    "bias_gelu_passes",
    BiasGelu(forward_reference, backward_reference),
    {
        "triton": triton_kernels("common.ops.bias_gelu.triton"),
    },
    cases="common.ops.bias_gelu.cases:SEPARATE",
)
"""Functions: those of :class:`BiasGelu`."""
