"""GEGLU of a matrix product and its bias: ``value * gelu(gate)``. Each row holds all values, then all gates.

GEGLU is from Shazeer, arXiv:2002.05202, section 2. The GELU is exact: ``0.5 z (1 + erf(z / sqrt(2)))`` (Hendrycks,
Gimpel, arXiv:1606.08415). The bias of the product is added when the product is read. The pass that writes the gradient
of the product also computes the gradient of the bias.
"""

from __future__ import annotations

from common.ops.geglu.reference import geglu_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

GEGLU = Operation(
    "geglu",
    geglu_reference,
    {
        "triton": triton_kernels("common.ops.geglu.triton:geglu"),
    },
    kernel_names=(("GEGLU", r"^geglu_"),),
    cases="common.ops.geglu.cases",
)
"""Signature: ``geglu(x_R2C, bias_2C)``."""
