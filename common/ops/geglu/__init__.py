"""GEGLU of a matrix product and its bias: ``value * gelu(gate)``, value and gate side by side, value first.

Shazeer, arXiv:2002.05202, section 2, with the GELU of Hendrycks, Gimpel, arXiv:1606.08415, in its exact form
``0.5 z (1 + erf(z / sqrt(2)))``. The bias of the product is added where the product is read, and its gradient comes out
of the pass that writes the product's.
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
