"""The reference of :mod:`benchmarks.dlrm_dcnv2.ops.cross_network`, and the autograd function of all implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.triton_support import widen


class Passes(NamedTuple):
    """What an implementation is made of; none of it is seen by autograd.

    Attributes:
        cross: (u, W, b, x0, x, keep) to ``h = u W^T + b``, None unless ``keep``, and ``x0 * h + x``.
        gradient: (dy, x0, h, first) to the gradients of h, of x0 and of b: ``dh = dy * x0``; ``dx0 = dy * h``, and
            ``+ dy`` in the first layer, whose x is x0; and the column sums of dh, in fp32 (fp64 of fp64).
        between: (du, V, dy, x0, h, dx0, first) from a layer to the one before, whose h it is, and which may be the
            first. To ``dy + du V``, which is the gradient of that one's result, or None if it is the first; and its
            dh, dx0 with what came before, and column sums. May write over the dx0 that was given.
    """

    cross: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor | None, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
    between: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor | None, Tensor, Tensor, Tensor]
    ]


class _Handed(NamedTuple):
    """What the node of a layer leaves in the backward pass to that of the layer before.

    Attributes:
        du_BR, v_RX, dy_BX: of the layer: ``dy + du V`` is the gradient of its input.
        x0_BX, dx0_BX: x0, and its gradient so far.
    """

    du_BR: Tensor
    v_RX: Tensor
    dy_BX: Tensor
    x0_BX: Tensor
    dx0_BX: Tensor


class _CrossLayer(torch.autograd.Function):
    """Autograd around the passes of an implementation: a node for each layer, one after the other.

    So the gradients of a layer's weights are there, and may be reduced over ranks, while the layers before are
    differentiated. A layer's part of the gradient of x0, and what the fused passes of two layers share, goes from node
    to node in ``handed``; the first layer returns the sum. Of every layer its input, u and h are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, keep: bool, number: int, layers: int, handed: list[_Handed],
        x0_BX: Tensor, x_BX: Tensor, v_RX: Tensor, w_XR: Tensor, b_X: Tensor,
    ) -> Tensor:  # fmt: skip
        first, last = number == 0, number == layers - 1
        u_BR = x_BX @ v_RX.t()
        h_BX, y_BX = passes.cross(u_BR, w_XR, b_X, x0_BX, x_BX, keep)
        if keep:
            inputs = ([x0_BX] if last else []) + ([] if first else [x_BX])
            ctx.save_for_backward(v_RX, w_XR, b_X, u_BR, h_BX, *inputs)
        ctx.passes, ctx.first, ctx.last, ctx.handed = passes, first, last, handed
        ctx.set_materialize_grads(last)  # the others are handed theirs
        return y_BX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        v_RX, w_XR, b_X, u_BR, h_BX, *inputs = ctx.saved_tensors
        dy_BX: Tensor | None
        if ctx.last:
            dy_BX, x0_BX = gradients[0], inputs[0]
            dh_BX, dx0_BX, db_X = ctx.passes.gradient(dy_BX, x0_BX, h_BX, ctx.first)
        else:
            after = ctx.handed.pop()
            x0_BX = after.x0_BX
            dy_BX, dh_BX, dx0_BX, db_X = ctx.passes.between(
                after.du_BR, after.v_RX, after.dy_BX, x0_BX, h_BX, after.dx0_BX, ctx.first
            )
        du_BR = dh_BX @ w_XR
        dv_RX = du_BR.t() @ (x0_BX if ctx.first else inputs[-1])
        dw_XR = dh_BX.t() @ u_BR
        if not ctx.first:
            assert dy_BX is not None
            ctx.handed.append(_Handed(du_BR, v_RX, dy_BX, x0_BX, dx0_BX))
        elif ctx.needs_input_grad[5]:
            dx0_BX = dx0_BX.addmm_(du_BR, v_RX)
        return (*[None] * 5, dx0_BX if ctx.first else None, None, dv_RX, dw_XR, db_X.to(b_X.dtype))


def cross_reference(
    u_BR: Tensor, w_XR: Tensor, b_X: Tensor, x0_BX: Tensor, x_BX: Tensor, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """The product with its bias, then the cross."""
    h_BX = torch.addmm(b_X, u_BR, w_XR.t())
    return h_BX if keep else None, torch.addcmul(x_BX, x0_BX, h_BX)


def gradient_reference(dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, of x0 and of b."""
    dy, x0 = widen(dy_BX), widen(x0_BX)
    dh, dx0 = dy * x0, dy * widen(h_BX)
    if first:
        dx0 += dy
    return dh.to(dy_BX.dtype), dx0.to(dy_BX.dtype), dh.sum(0)


def between_reference(
    du_BR: Tensor, v_RX: Tensor, dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, dx0_BX: Tensor, first: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The product onto the gradient, then the next layer's pass."""
    dx_BX = torch.addmm(dy_BX, du_BR, v_RX)
    dh_BX, own_BX, db_X = gradient_reference(dx_BX, x0_BX, h_BX, first)
    return dx_BX, dh_BX, dx0_BX.add_(own_BX), db_X


PASSES = Passes(cross_reference, gradient_reference, between_reference)


def cross_network_reference(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Reference implementation.

    Args:
        x0_BX: contiguous.
        v, w, b: of every layer, (R, X), (X, R) and (X,).

    Returns:
        The last layer's result, (B, X). All tensors have one dtype.
    """
    return apply(PASSES, x0_BX, v, w, b)


def apply(passes: Passes, x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """An implementation with autograd."""
    handed: list[_Handed] = []
    keep, x_BX = torch.is_grad_enabled(), x0_BX
    for number, parameters in enumerate(zip(v, w, b, strict=True)):
        x_BX = _CrossLayer.apply(passes, keep, number, len(v), handed, x0_BX, x_BX, *parameters)
    return x_BX
