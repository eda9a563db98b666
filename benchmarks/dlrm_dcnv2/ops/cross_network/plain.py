"""The plain version of :mod:`benchmarks.dlrm_dcnv2.ops.cross_network`, and the autograd that all versions share."""

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


class CrossNetwork(torch.autograd.Function):
    """Autograd around the passes of an implementation: one node for all layers, which share the gradient of x0.

    Of every layer its input, u and h are kept.
    """

    @staticmethod
    def forward(ctx: Any, passes: Passes, keep: bool, x0_BX: Tensor, *parameters: Tensor) -> Tensor:
        v, w, b = _by_kind(parameters)
        x_BX, kept = x0_BX, []
        for v_RX, w_XR, b_X in zip(v, w, b, strict=True):
            u_BR = x_BX @ v_RX.t()
            h_BX, y_BX = passes.cross(u_BR, w_XR, b_X, x0_BX, x_BX, keep)
            if keep:
                kept += [x_BX, u_BR, h_BX]
            x_BX = y_BX
        ctx.save_for_backward(*parameters, *kept)
        ctx.passes = passes
        return x_BX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layers = len(ctx.saved_tensors) // 6
        parameters, kept = ctx.saved_tensors[: 3 * layers], ctx.saved_tensors[3 * layers :]
        v, w, b = _by_kind(parameters)
        x0_BX, dy_BX = kept[0], gradients[0]
        found: list[Tensor] = [*parameters]
        dh_BX, dx0_BX, db_X = ctx.passes.gradient(dy_BX, x0_BX, kept[-1], layers == 1)
        for layer in reversed(range(layers)):
            x_BX, u_BR, _ = kept[3 * layer : 3 * layer + 3]
            du_BR = dh_BX @ w[layer]
            found[layer] = du_BR.t() @ x_BX
            found[layers + layer] = dh_BX.t() @ u_BR
            found[2 * layers + layer] = db_X.to(b[layer].dtype)
            if layer:
                dy_BX, dh_BX, dx0_BX, db_X = ctx.passes.between(
                    du_BR, v[layer], dy_BX, x0_BX, kept[3 * layer - 1], dx0_BX, layer == 1
                )
            elif ctx.needs_input_grad[2]:
                dx0_BX = dx0_BX.addmm_(du_BR, v[0])
        return None, None, dx0_BX, *found


def _by_kind(parameters: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """V, W and b of all layers."""
    layers = len(parameters) // 3
    return parameters[:layers], parameters[layers : 2 * layers], parameters[2 * layers :]


def cross_torch(
    u_BR: Tensor, w_XR: Tensor, b_X: Tensor, x0_BX: Tensor, x_BX: Tensor, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """The product with its bias, then the cross."""
    h_BX = torch.addmm(b_X, u_BR, w_XR.t())
    return h_BX if keep else None, torch.addcmul(x_BX, x0_BX, h_BX)


def gradient_torch(dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, of x0 and of b."""
    dy, x0 = widen(dy_BX), widen(x0_BX)
    dh, dx0 = dy * x0, dy * widen(h_BX)
    if first:
        dx0 += dy
    return dh.to(dy_BX.dtype), dx0.to(dy_BX.dtype), dh.sum(0)


def between_torch(
    du_BR: Tensor, v_RX: Tensor, dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, dx0_BX: Tensor, first: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The product onto the gradient, then the next layer's pass."""
    dx_BX = torch.addmm(dy_BX, du_BR, v_RX)
    dh_BX, own_BX, db_X = gradient_torch(dx_BX, x0_BX, h_BX, first)
    return dx_BX, dh_BX, dx0_BX.add_(own_BX), db_X


PASSES = Passes(cross_torch, gradient_torch, between_torch)


def cross_network_torch(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Plain version.

    Args:
        x0_BX: contiguous.
        v, w, b: of every layer, (R, X), (X, R) and (X,).

    Returns:
        The last layer's result, (B, X). All tensors have one dtype.
    """
    return apply(PASSES, x0_BX, v, w, b)


def apply(passes: Passes, x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """An implementation with autograd."""
    y_BX: Tensor = CrossNetwork.apply(passes, torch.is_grad_enabled(), x0_BX, *v, *w, *b)
    return y_BX
