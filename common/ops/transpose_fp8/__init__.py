"""The transpose of an FP8 matrix, in memory that is given.

A Hopper GPU multiplies FP8 only where both operands run along the summed dimension in memory. The input gradient
``dy w`` sums over the rows of ``w``, and so takes its transpose, which for a frozen weight is made where it is needed,
in a scratch that all layers share, and not kept. The weight's gradient sums over tokens, and takes the transposes of
input and gradient, which those kernels leave out whose programs hold whole rows.

Rows that ranks have cast with scales of their own come to one scale on the way: each run of rows has a factor of at
most 1. Where the scales were equal the factor is 1, and changes nothing.
"""

from __future__ import annotations

from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.transpose_fp8.reference import transpose_reference
from common.ops.triton_support import no_triton


def _unsupported(request: OperationRequest) -> str | None:
    if request.dtype.itemsize != 1:
        return f"matrices are of 8 bits, not {request.dtype}"
    return no_triton(request.device)


TRANSPOSE_FP8 = Operation(
    "transpose_fp8",
    transpose_reference,
    {
        "triton": Implementation("common.ops.transpose_fp8.triton:transpose", _unsupported),
    },
    kernel_names=(("transposes in FP8", r"^transpose_fp8_"),),
    cases="common.ops.transpose_fp8.cases",
)
"""Signature: ``transpose(matrix_NK, scratch, factors_R=None) -> (K, N)`` in the memory of ``scratch``. The request has
the matrix's dtype."""
