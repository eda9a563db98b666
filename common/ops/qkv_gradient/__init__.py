"""The gradient of a product whose columns are query, key and value of one head after another, and of its bias.

Megatron-LM's order of a fused product, (T, H, 3, D): a part of its heads is a part of its columns. Attention reads the
three as views of the product. Their gradients come as three tensors, or as views of one, which the libraries that write
where they are told to fill. One pass puts them together, sums them over tokens for the bias, and casts them to FP8 with
a delayed scale (:mod:`common.ops.fp8_cast`), in both orders where the products want both.
"""

from __future__ import annotations

from typing import Any

from common.ops.implementation import Implementation, always
from common.ops.qkv_gradient.plain import JoinQkv, QkvGradient, join_torch
from common.ops.triton_support import triton_unsupported

__all__ = ["IMPLEMENTATIONS", "KERNEL_NAMES", "JoinQkv", "QkvGradient"]


def _join_triton(*args: Any, **kwargs: Any) -> QkvGradient:
    from common.ops.qkv_gradient import triton  # triton is imported only where it is used

    return triton.join(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _join_triton, triton_unsupported),
    "torch": Implementation("torch", join_torch, always),
}
"""Functions: :data:`JoinQkv`, with the signature of :func:`common.ops.qkv_gradient.plain.join_torch`."""

KERNEL_NAMES = (("gradient of query, key and value", r"^qkv_gradient_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
