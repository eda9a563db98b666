"""Weight gradient from FP8 operands, added to the gradient of earlier micro-batches.

``gradient += dy^T x``. Both operands are given transposed, because a Hopper GPU multiplies FP8 matrices only if the
summed dimension is contiguous in both. ``torch._scaled_mm`` cannot add: its product is written and then added, which
moves 8 bytes per weight of a bf16 gradient instead of 4. A direct call of cuBLASLt adds within the product and rounds
once to the dtype of the gradient. For 16-bit operands PyTorch's product can add (:mod:`.half`).
"""

from __future__ import annotations

from common.ops.operation import Implementation, Operation
from common.ops.weight_gradient import cublaslt
from common.ops.weight_gradient.reference import accumulate_reference

WEIGHT_GRADIENT = Operation(
    "weight_gradient",
    accumulate_reference,
    {
        "cublaslt": Implementation(cublaslt.accumulate, cublaslt.unsupported),
    },
    cases="common.ops.weight_gradient.cases",
)
"""Signature: ``accumulate(dy_OT, x_IT, dy_inverse, x_inverse, gradient_OI, room)``. The dtype of a request is that of
the weight. The gradient has this dtype, or fp32, which all implementations support."""
