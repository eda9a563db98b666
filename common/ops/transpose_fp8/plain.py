"""The plain version of :mod:`common.ops.transpose_fp8`."""

from __future__ import annotations

from torch import Tensor


def transpose_torch(weight_NK: Tensor, scratch: Tensor) -> Tensor:
    """Plain version.

    Args:
        weight_NK: FP8, contiguous.
        scratch: of the same dtype, contiguous, with room for as many elements; overwritten.

    Returns:
        (K, N), a view of the scratch.

    Raises:
        ValueError: the scratch is too small, or of another dtype.
    """
    target_KN = room(weight_NK, scratch)
    return target_KN.copy_(weight_NK.t())


def room(weight_NK: Tensor, scratch: Tensor) -> Tensor:
    """The part of the scratch that the transpose takes, (K, N).

    Raises:
        ValueError: the scratch is too small, or of another dtype.
    """
    if scratch.dtype != weight_NK.dtype:
        raise ValueError(f"a scratch of {scratch.dtype} can't hold a weight of {weight_NK.dtype}")
    if scratch.numel() < weight_NK.numel():
        raise ValueError(f"a scratch of {scratch.numel()} elements can't hold a weight of {weight_NK.numel()}")
    return scratch.view(-1)[: weight_NK.numel()].view(weight_NK.shape[1], weight_NK.shape[0])
