"""The plain version of :mod:`common.ops.transpose_fp8`."""

from __future__ import annotations

from torch import Tensor


def transpose_torch(matrix_NK: Tensor, scratch: Tensor) -> Tensor:
    """Plain version.

    Args:
        matrix_NK: FP8, contiguous.
        scratch: of the same dtype, contiguous, with room for as many elements; overwritten.

    Returns:
        (K, N), a view of the scratch.

    Raises:
        ValueError: the scratch is too small, or of another dtype.
    """
    target_KN = room(matrix_NK, scratch)
    return target_KN.copy_(matrix_NK.t())


def room(matrix_NK: Tensor, scratch: Tensor) -> Tensor:
    """The part of the scratch that the transpose takes, (K, N).

    Raises:
        ValueError: the scratch is too small, or of another dtype.
    """
    if scratch.dtype != matrix_NK.dtype:
        raise ValueError(f"a scratch of {scratch.dtype} can't hold a matrix of {matrix_NK.dtype}")
    if scratch.numel() < matrix_NK.numel():
        raise ValueError(f"a scratch of {scratch.numel()} elements can't hold a matrix of {matrix_NK.numel()}")
    return scratch.view(-1)[: matrix_NK.numel()].view(matrix_NK.shape[1], matrix_NK.shape[0])
