"""A weight's gradient out of operands in FP8, added to what micro-batches before have left.

``gradient += dy^T x``: both operands come transposed, since a Hopper GPU multiplies FP8 only where they run along the
summed dimension in memory. ``torch._scaled_mm`` cannot add: its product is written and then added, which moves 8 bytes
for each weight of a gradient in bf16 where 4 would do. cuBLASLt, called by itself, adds within the product, and rounds
once to the gradient's dtype. Of operands in 16 bits PyTorch's product adds (:mod:`.half`).
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
"""Signature: ``accumulate(dy_OT, x_IT, dy_inverse, x_inverse, gradient_OI, room)``. The request has the weight's
dtype; the gradient has it too, or fp32, to which all of them add."""
