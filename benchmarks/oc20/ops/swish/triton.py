# mypy: allow-untyped-defs
"""Triton kernel of swish and two derivatives. It reads and writes every element once in each pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.tile import Tile


@triton.jit
def swish_kernel(
    x_ptr, dy_ptr, ddx_ptr, first_ptr, second_ptr, N, ORDER: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the results of :func:`_launch`. Grid (ceil(N / BLOCK),)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < N
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(WIDE)
    sigmoid = 1 / (1 + tl.exp(-x))
    if ORDER == 0:
        tl.store(first_ptr + index, x * sigmoid, mask=inside)
    else:
        dy = tl.load(dy_ptr + index, mask=inside, other=0.0).to(WIDE)
        slope = sigmoid * (1 + x * (1 - sigmoid))
        if ORDER == 1:
            tl.store(first_ptr + index, dy * slope, mask=inside)
        else:
            ddx = tl.load(ddx_ptr + index, mask=inside, other=0.0).to(WIDE)
            curvature = sigmoid * (1 - sigmoid) * (2 + x * (1 - 2 * sigmoid))
            tl.store(first_ptr + index, ddx * slope, mask=inside)
            tl.store(second_ptr + index, ddx * dy * curvature, mask=inside)


TILES: dict[str, Tile] = {"swish": Tile(elements=1024, warps=4)}


def _launch(order: int, x: Tensor, *gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return y(x), or dx = dy y'(x), or both gradients of dx, by dy and by x, for the gradient ddx of dx.

    Args:
        order: number of the derivative.
        gradients: dy and ddx, as many as the derivative needs.
    """
    x, (dy, ddx) = x.contiguous(), (*(each.contiguous() for each in gradients), None, None)[:2]
    first, tile = torch.empty_like(x), TILES["swish"]
    second = torch.empty_like(x) if order == 2 else first
    swish_kernel[(triton.cdiv(x.numel(), tile.elements),)](
        x, dy, ddx, first, second, x.numel(), ORDER=order,
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32, BLOCK=tile.elements, num_warps=tile.warps,
    )  # fmt: skip
    return first, second


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _launch(0, x)[0]

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        gradient: Tensor = _Slope.apply(*dy, *ctx.saved_tensors)
        return gradient


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(dy, x)
        return _launch(1, x, dy)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *ddx: Tensor) -> tuple[Tensor, Tensor]:
        dy, x = ctx.saved_tensors
        return _launch(2, x, dy, *ddx)


def swish(x: Tensor) -> Tensor:
    """Return x sigmoid(x), with two derivatives; see :func:`benchmarks.oc20.ops.swish.swish_reference`."""
    y: Tensor = _Swish.apply(x)
    return y
