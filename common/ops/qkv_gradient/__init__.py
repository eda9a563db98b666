"""Gradient of the output of a fused query-key-value projection, and of its bias.

The columns have Megatron-LM's order of a fused product, (T, H, 3, D), so a range of heads is a range of columns.
Attention reads queries, keys and values as views of the product. Their gradients are three tensors, or views of one
tensor if the attention library writes to given memory. One pass joins them, sums them over tokens for the bias, and
casts them to FP8 with a delayed scale (:mod:`common.ops.fp8_cast`), optionally also transposed.

Shapes: T tokens, H heads, D head size, N = 3 H D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import E5M2, Fp8Tensor, Scaling, computed_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


class QkvGradient(NamedTuple):
    """Gradient of the output of the fused query-key-value projection, with columns (H, 3, D).

    Attributes:
        d_qkv: (T, N), dtype of the three gradients; None if not requested.
        d_qkv8: (T, N), e5m2; None if not requested.
        bias: (N,), sums over tokens, fp32, or fp64 for fp64 inputs.
    """

    d_qkv: Tensor | None
    d_qkv8: Fp8Tensor | None
    bias: Tensor


JoinQkv = Callable[..., QkvGradient]


@torch.no_grad()
def join_reference(
    dq_THD: Tensor,
    dk_THD: Tensor,
    dv_THD: Tensor,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    transpose: bool = False,
    frozen_scales: bool = False,
) -> QkvGradient:
    """Return the joined gradient and its sums over tokens.

    Args:
        dq_THD, dk_THD, dv_THD: gradients of queries, keys and values: separate tensors, or views of one (T, H, 3, D).
            The last dimension is contiguous; the other strides are arbitrary.
        half: return the gradient in the input dtype. For views of one tensor, that tensor is returned without a copy.
        fp8: scale of the gradient in e5m2; None for no FP8.
        transpose: whether the FP8 tensor includes its transpose.
        frozen_scales: leave the scale as it is.

    Raises:
        ValueError: the shapes differ, or a last dimension is not contiguous.
    """
    check(dq_THD, dk_THD, dv_THD)
    d_qkv_TN = joined(dq_THD, dk_THD, dv_THD)
    if d_qkv_TN is None:
        d_qkv_TN = torch.stack([dq_THD, dk_THD, dv_THD], 2).flatten(1)
    widened_TN = widen(d_qkv_TN)
    d_qkv8 = None if fp8 is None else computed_reference(widened_TN, fp8, E5M2, dq_THD.dtype, frozen_scales)
    if d_qkv8 is not None and transpose:
        d_qkv8 = replace(d_qkv8, transposed=d_qkv8.data.t().contiguous())
    return QkvGradient(d_qkv_TN if half else None, d_qkv8, widened_TN.sum(0))


def check(dq_THD: Tensor, dk_THD: Tensor, dv_THD: Tensor) -> None:
    """Check shapes and strides of the three gradients.

    Raises:
        ValueError: the shapes differ, or a last dimension is not contiguous.
    """
    shapes = [tuple(x.shape) for x in (dq_THD, dk_THD, dv_THD)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 3:
        raise ValueError(f"gradients of queries, keys and values are (T, H, D) each, not {shapes}")
    strides = [x.stride(2) for x in (dq_THD, dk_THD, dv_THD)]
    if shapes[0][2] > 1 and strides != [1, 1, 1]:
        raise ValueError(f"the last dimension of each gradient must be dense, not of strides {strides}")


def joined(dq_THD: Tensor, dk_THD: Tensor, dv_THD: Tensor) -> Tensor | None:
    """Return the tensor (T, N) whose views the three gradients are, or None if they are not views of one tensor."""
    tokens, heads, size = dq_THD.shape
    columns = 3 * heads * size
    first = dq_THD.storage_offset()
    for part, x in enumerate((dq_THD, dk_THD, dv_THD)):
        same_memory = x.untyped_storage().data_ptr() == dq_THD.untyped_storage().data_ptr()
        if not same_memory or x.storage_offset() != first + part * size or x.stride() != (columns, 3 * size, 1):
            return None
    return dq_THD.as_strided((tokens, columns), (columns, 1))


QKV_GRADIENT = Operation(
    "qkv_gradient",
    join_reference,
    {
        "triton": triton_kernels("common.ops.qkv_gradient.triton:join"),
    },
    kernel_names=(("gradient of query, key and value", r"^qkv_gradient_"),),
    cases="common.ops.qkv_gradient.cases",
)
"""Signature: that of :func:`join_reference`."""
