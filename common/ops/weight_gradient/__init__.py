"""A weight's gradient out of operands in FP8, added to what micro-batches before have left.

``gradient += dy^T x``: both operands come transposed, since a Hopper GPU multiplies FP8 only where they run along the
summed dimension in memory. ``torch._scaled_mm`` cannot add: its product is written and then added, which moves 8 bytes
for each weight of a gradient in bf16 where 4 would do. The others add within the product: cuBLASLt called by itself,
a Triton kernel, and Transformer Engine.

What adds rounds once to the gradient's dtype, or, where the memory adds, as often as the product that is added later.
"""

from __future__ import annotations

from typing import Any

from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import no_triton
from common.ops.weight_gradient import cublaslt, te
from common.ops.weight_gradient.plain import accumulate_torch


def _accumulate_triton(*args: Any) -> None:
    from common.ops.weight_gradient.triton import accumulate  # triton is imported only where it is used

    accumulate(*args)


def _triton_unsupported(request: OperationRequest) -> str | None:
    reason = no_triton(request.device)
    if reason is not None:
        return reason
    from common.ops.weight_gradient import triton

    return triton.unsupported(request)


IMPLEMENTATIONS = {
    "torch": Implementation("torch", accumulate_torch, always),
    "cublaslt": Implementation("cublaslt", cublaslt.accumulate, cublaslt.unsupported),
    "triton": Implementation("triton", _accumulate_triton, _triton_unsupported),
    "te": Implementation("te", te.accumulate, te.unsupported),
}
"""Signature: ``accumulate(dy_OT, x_IT, dy_inverse, x_inverse, gradient_OI, room)``. The request has the gradient's
dtype."""

KERNEL_NAMES = (("weight gradients", r"^weight_gradient_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
