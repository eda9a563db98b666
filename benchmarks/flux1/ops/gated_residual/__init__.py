"""End of a sub-layer of a diffusion transformer: ``x + gate (delta + other + bias)``, with a gate of each sample.

Peebles, Xie, arXiv:2212.09748, section 3.2. ``delta`` and ``other`` are the results of one or two matrix products whose
sum has the bias. The gradients of both products are one tensor. All tokens of a sample share a gate, so its gradient is
a sum over the tokens of the sample; the same pass adds up the gradient of the bias.

If the products' backward pass is in FP8, the kernels write their gradient only in FP8, with a delayed scale
(:mod:`common.ops.fp8_cast`).

Shapes: N samples, R rows (the tokens of all samples, sample by sample), E features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.fp8_cast.reference import E5M2, Fp8Tensor, Handover, Scaling, computed_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def gated_residual_reference(
    x_RE: Tensor,
    delta_RE: Tensor,
    other_RE: Tensor | None,
    bias_E: Tensor,
    gate_NE: Tensor,
    *,
    handovers: Sequence[Handover | None] = (),
) -> Tensor:
    """Return ``x + gate (delta + other + bias)``, (R, E), in the dtype of x.

    Args:
        x_RE: every sample has R / N consecutive rows.
        delta_RE, other_RE: results of matrix products without bias; ``other_RE`` may be None.
        gate_NE: rows may be parts of the rows of a larger tensor.
        handovers: those of the products. If the first has a scale, each of them receives the gradient in e5m2 with this
            scale; otherwise the gradients are in the dtype of the products.
    """
    products = [each for each in (delta_RE, other_RE) if each is not None]
    if scaling_of(handovers) is None:
        sum_RE = sum(widen(each) for each in products) + widen(bias_E)
    else:
        sum_RE = _SumOfProducts.apply(handovers, *products) + widen(bias_E)
    gated_NLE = widen(gate_NE).unsqueeze(1) * sum_RE.unflatten(0, (len(gate_NE), -1))
    return (widen(x_RE) + gated_NLE.flatten(0, 1)).to(x_RE.dtype)


def scaling_of(handovers: Sequence[Handover | None]) -> Scaling | None:
    """Return the scale of the products' gradient; None if it is not in FP8."""
    return handovers[0].scaling if handovers and handovers[0] is not None else None


def leave(handovers: Sequence[Handover | None], gradient: Fp8Tensor) -> Tensor:
    """Store the gradient for each product, and return its ``source`` for autograd."""
    for handover in handovers:
        if handover is not None:
            handover.leave(gradient)
    return gradient.source


class _SumOfProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handovers: Sequence[Handover | None], *products_RE: Tensor) -> Tensor:
        ctx.handovers, ctx.dtype, ctx.count = handovers, products_RE[0].dtype, len(products_RE)
        return torch.stack([widen(each) for each in products_RE]).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RE: Tensor) -> tuple[Tensor | None, ...]:
        scaling = scaling_of(ctx.handovers)
        assert scaling is not None
        source_RE = leave(ctx.handovers, computed_reference(d_RE, scaling, E5M2, ctx.dtype))
        return None, *(source_RE,) * ctx.count


GATED_RESIDUAL = Operation(
    "gated_residual",
    gated_residual_reference,
    {
        "triton": triton_kernels("benchmarks.flux1.ops.gated_residual.triton:gated_residual"),
    },
    kernel_names=(("gate and residual", r"^gated_residual_"),),
    cases="benchmarks.flux1.ops.gated_residual.cases",
)
"""Signature: that of :func:`gated_residual_reference`."""
