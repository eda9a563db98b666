"""Transpose of an FP8 matrix into given memory.

A Hopper GPU multiplies FP8 matrices only if the summed dimension is contiguous in both operands. The input gradient
``dy w`` sums over the rows of ``w``, so it needs the transpose of w. For a frozen weight the transpose is computed
when it is needed, in a scratch buffer that all layers share, and is not kept. The weight gradient sums over tokens, so
it needs the transposes of input and gradient, which kernels whose programs hold whole rows do not write.

If ranks have cast their rows with different scales, the transpose also converts them to one scale: each run of rows
has a factor of at most 1. For equal scales the factor is 1 and changes nothing.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import no_triton


def transpose_reference(matrix_NK: Tensor, scratch: Tensor, factors_R: Tensor | None = None) -> Tensor:
    """Return the transpose (K, N) as a view of the scratch buffer.

    Args:
        matrix_NK: FP8, contiguous.
        scratch: same dtype, contiguous, at least as many elements; overwritten.
        factors_R: fp32, contiguous, at most 1: one factor for each of R equal runs of rows, which are multiplied by it
            and rounded again; None for no factors.

    Raises:
        ValueError: the scratch is too small or has another dtype, or the runs are not equally long.
    """
    target_KN = transposed_view(matrix_NK, scratch)
    if factors_R is None:
        return target_KN.copy_(matrix_NK.t())
    runs_RNK = matrix_NK.view(len(factors_R), run_length(matrix_NK, factors_R), -1).float()
    scaled_RNK = (runs_RNK * factors_R.view(-1, 1, 1)).to(matrix_NK.dtype)
    return target_KN.copy_(scaled_RNK.flatten(0, 1).t())


def run_length(matrix_NK: Tensor, factors_R: Tensor) -> int:
    """Return the number of rows of each run that has a factor.

    Raises:
        ValueError: the runs are not equally long.
    """
    rows, runs = len(matrix_NK), len(factors_R)
    if rows % runs:
        raise ValueError(f"{rows} rows can't be {runs} equal runs with a factor each")
    return rows // runs


def transposed_view(matrix_NK: Tensor, scratch: Tensor) -> Tensor:
    """Return the part of the scratch that holds the transpose, (K, N).

    Raises:
        ValueError: the scratch is too small or has another dtype.
    """
    if scratch.dtype != matrix_NK.dtype:
        raise ValueError(f"a scratch of {scratch.dtype} can't hold a matrix of {matrix_NK.dtype}")
    if scratch.numel() < matrix_NK.numel():
        raise ValueError(f"a scratch of {scratch.numel()} elements can't hold a matrix of {matrix_NK.numel()}")
    return scratch.view(-1)[: matrix_NK.numel()].view(matrix_NK.shape[1], matrix_NK.shape[0])


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
