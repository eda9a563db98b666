"""The gradient of a product whose columns are query, key and value of one head after another, and of its bias.

Megatron-LM's order of a fused product, (T, H, 3, D): a part of its heads is a part of its columns. Attention reads the
three as views of the product. Their gradients come as three tensors, or as views of one, which the libraries that write
where they are told to fill. One pass puts them together, sums them over tokens for the bias, and casts them to FP8 with
a delayed scale (:mod:`common.ops.fp8_cast`), in both orders where the products want both.
"""

from __future__ import annotations

from common.ops.operation import Operation
from common.ops.qkv_gradient.reference import JoinQkv, QkvGradient, join_reference
from common.ops.triton_support import triton_kernels

__all__ = ["QKV_GRADIENT", "JoinQkv", "QkvGradient"]


QKV_GRADIENT = Operation(
    "qkv_gradient",
    join_reference,
    {
        "triton": triton_kernels("common.ops.qkv_gradient.triton:join"),
    },
    kernel_names=(("gradient of query, key and value", r"^qkv_gradient_"),),
    cases="common.ops.qkv_gradient.cases",
)
"""Functions: :data:`JoinQkv`, with the signature of :func:`common.ops.qkv_gradient.reference.join_reference`."""
