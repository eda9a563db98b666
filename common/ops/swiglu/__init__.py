"""SwiGLU of a fused product: ``silu(gate) up`` of rows ``gate | up``, optionally in FP8.

Shazeer, arXiv:2002.05202, section 2, without biases. The functions work without autograd. The caller keeps ``saved``
for the backward pass: the product itself, or its e4m3 form, which takes half the memory for one more rounding. FP8
results are rounded directly from fp32, with a delayed scale (:mod:`common.ops.fp8_cast`).
"""

from __future__ import annotations

from common.ops.operation import Operation
from common.ops.swiglu.reference import SwiGlu, backward_reference, forward_reference
from common.ops.triton_support import triton_kernels

SWIGLU = Operation(
    "swiglu",
    SwiGlu(forward_reference, backward_reference),
    {
        "triton": triton_kernels("common.ops.swiglu.triton"),
    },
    kernel_names=(("SwiGLU", r"^swiglu_"),),
    cases="common.ops.swiglu.cases",
)
"""Functions: :class:`SwiGlu`."""
