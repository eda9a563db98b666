"""Low-rank cross network: ``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``.

Wang et al., arXiv:2008.13535, equation 1, with a weight of two factors and no nonlinearity between them. Every layer
has its own autograd node; the gradient of x_0 is accumulated from layer to layer.

Shapes: B samples, X inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen

Gradient = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor, Tensor]]
"""Signature of :func:`gradient_reference`."""


class _CrossLayer(torch.autograd.Function):
    """Autograd function of one layer, with a hand-written backward pass.

    Each layer is one node, so the gradients of its weights are final, and can be reduced over ranks, while earlier
    layers are still being differentiated. Every layer contributes to the gradient of x0: the list ``handed`` passes
    the sum from node to node, and the first layer returns it.
    """

    @staticmethod
    def forward(
        ctx: Any, gradient: Gradient, number: int, layers: int, handed: list[Tensor],
        x0_BX: Tensor, x_BX: Tensor, v_RX: Tensor, w_XR: Tensor, b_X: Tensor,
    ) -> Tensor:  # fmt: skip
        u_BR = x_BX @ v_RX.t()
        h_BX = torch.addmm(b_X, u_BR, w_XR.t())
        ctx.save_for_backward(x0_BX, x_BX, v_RX, w_XR, u_BR, h_BX)
        ctx.gradient, ctx.first, ctx.last, ctx.handed = gradient, number == 0, number == layers - 1, handed
        return torch.addcmul(x_BX, x0_BX, h_BX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BX: Tensor) -> tuple[Tensor | None, ...]:
        x0_BX, x_BX, v_RX, w_XR, u_BR, h_BX = ctx.saved_tensors
        dh_BX, dx0_BX, db_X = ctx.gradient(dy_BX, x0_BX, h_BX, None if ctx.last else ctx.handed.pop(), ctx.first)
        du_BR = dh_BX @ w_XR
        parameters = du_BR.t() @ x_BX, dh_BX.t() @ u_BR, db_X.to(w_XR.dtype)
        if not ctx.first:
            ctx.handed.append(dx0_BX)
            return (*[None] * 5, torch.addmm(dy_BX, du_BR, v_RX), *parameters)
        dx0 = dx0_BX.addmm_(du_BR, v_RX) if ctx.needs_input_grad[4] else None
        return (*[None] * 4, dx0, None, *parameters)


def gradient_reference(
    dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, dx0_BX: Tensor | None, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``y = x0 * h + x`` by h, x0 and b.

    Args:
        dx0_BX: gradient of x0 from later layers, which may be overwritten; None in the last layer.
        first: whether x is x0; then ``dy`` is added to the gradient of x0.

    Returns:
        ``dy * x0``; ``dx0 + dy * h``; the column sums of ``dy * x0`` in fp32, or fp64 for fp64 inputs.
    """
    dy, x0 = widen(dy_BX), widen(x0_BX)
    dh, dx0 = dy * x0, dy * widen(h_BX)
    if dx0_BX is not None:
        dx0 += dx0_BX
    if first:
        dx0 += dy
    return dh.to(dy_BX.dtype), dx0.to(dy_BX.dtype), dh.sum(0)


def cross_network_reference(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Compute all layers. All tensors have one dtype.

    Args:
        x0_BX: input, contiguous.
        v, w, b: one tensor per layer: (R, X), (X, R) and (X,).

    Returns:
        Output of the last layer, (B, X).
    """
    return apply(gradient_reference, x0_BX, v, w, b)


def apply(gradient: Gradient, x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return the output (B, X) of the last layer, with autograd.

    Args:
        gradient: implementation of :func:`gradient_reference` for the backward pass.
        v, w, b: parameters of each layer.
    """
    handed: list[Tensor] = []
    x_BX = x0_BX
    for number, parameters in enumerate(zip(v, w, b, strict=True)):
        x_BX = _CrossLayer.apply(gradient, number, len(v), handed, x0_BX, x_BX, *parameters)
    return x_BX


CROSS_NETWORK = Operation(
    "cross_network",
    cross_network_reference,
    {
        "fused": triton_kernels("benchmarks.dlrm_dcnv2.ops.cross_network.triton:cross_network"),
    },
    former={"triton": "fused"},
    kernel_names=(("cross network", r"^cross_gradient_"),),
    cases="benchmarks.dlrm_dcnv2.ops.cross_network.cases",
)
"""Signature: ``cross_network(x0_BX, v, w, b)``, with V, W and b of every layer.

``fused`` uses one of our kernels per layer in the backward pass; PyTorch computes the matrix products."""
