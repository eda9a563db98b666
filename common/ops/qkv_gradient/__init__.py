"""Gradient of a product whose columns are query, key and value of one head after another, and of its bias.

The columns have Megatron-LM's order of a fused product, (T, H, 3, D), so a range of heads is a range of columns.
Attention reads queries, keys and values as views of the product. Their gradients are three tensors, or views of one
tensor if the attention library writes to given memory. One pass joins them, sums them over tokens for the bias, and
casts them to FP8 with a delayed scale (:mod:`common.ops.fp8_cast`), optionally also transposed.
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
"""Signature: that of :func:`common.ops.qkv_gradient.reference.join_reference`."""
