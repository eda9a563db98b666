"""Transpose of an FP8 matrix into given memory.

A Hopper GPU multiplies FP8 matrices only if the summed dimension is contiguous in both operands. The input gradient
``dy w`` sums over the rows of ``w``, so it needs the transpose of w. For a frozen weight the transpose is computed
when it is needed, in a scratch buffer that all layers share, and is not kept. The weight gradient sums over tokens, so
it needs the transposes of input and gradient, which kernels whose programs hold whole rows do not write.

If ranks have cast their rows with different scales, the transpose also converts them to one scale: each run of rows
has a factor of at most 1. For equal scales the factor is 1 and changes nothing.
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
"""Signature: ``transpose(matrix_NK, scratch, factors_R=None) -> (K, N)`` in the memory of ``scratch``. The dtype of a
request is that of the matrix."""
