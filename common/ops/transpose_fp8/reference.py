"""Reference implementation of :mod:`common.ops.transpose_fp8`."""

from __future__ import annotations

from torch import Tensor


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
    target_KN = room(matrix_NK, scratch)
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


def room(matrix_NK: Tensor, scratch: Tensor) -> Tensor:
    """Return the part of the scratch that holds the transpose, (K, N).

    Raises:
        ValueError: the scratch is too small or has another dtype.
    """
    if scratch.dtype != matrix_NK.dtype:
        raise ValueError(f"a scratch of {scratch.dtype} can't hold a matrix of {matrix_NK.dtype}")
    if scratch.numel() < matrix_NK.numel():
        raise ValueError(f"a scratch of {scratch.numel()} elements can't hold a matrix of {matrix_NK.numel()}")
    return scratch.view(-1)[: matrix_NK.numel()].view(matrix_NK.shape[1], matrix_NK.shape[0])
