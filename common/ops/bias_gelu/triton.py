# mypy: allow-untyped-defs
"""Triton kernels of tanh GELU after a bias, over T rows of F features.

Forward reads x and writes y; backward reads dy and x and writes dx. The bias gradient, the column sums of dx, has two
levels: a program owns ``BLOCK_F`` columns, adds its tiles element by element and reduces over rows once at the end,
because this crosses warps (for every tile it would take four times as long as everything else). It writes one partial
sum; :mod:`common.ops.tiling` adds these in a fixed order.

In FP8 a program owns columns in both directions, and updates the maximum for the next scale with one atomic operation.
At the first use of a scale, every program first computes a sample of the results. Forward may save z = x + bias in FP8
for backward: half the bytes for one more rounding. The kernels do not write the transpose for the weight gradient: it
cost 0.29 and 0.24 ms here on an H200, and takes 0.06 ms in a separate pass.

With s = sigmoid(2 u) and u = sqrt(2 / pi) (z + 0.044715 z^3), ``0.5 z (1 + tanh u)`` is ``z s``, and its derivative is
``s + z s (1 - s) 2 u'``.

On an H200 at 24,576 tokens, F = 4096, 16 bit: forward 403 MB, 94 us at 4.3 TB/s; backward 604 MB, 140 us; with
results in FP8 302 MB, 70 us, and 503 MB, 118 us. One exponential and one reciprocal per element, 16 of either per
cycle and multiprocessor, take 55 us.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.bias_gelu import Gradients
from common.ops.fp8_cast.device import block_of_columns, load_tile
from common.ops.fp8_cast.reference import E4M3, E5M2, Activated, Fp8Tensor, Handover, Scaling
from common.ops.fp8_cast.triton import fields_for_autograd, launch, output
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import require_contiguous

_TWICE_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)
_MINUS_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)


@triton.jit
def _denominator(z):
    """Return 1 / sigmoid(2 u)."""
    linear: tl.constexpr = _TWICE_SQRT_2_OVER_PI * _MINUS_LOG2_E
    return 1.0 + tl.exp2(z * (linear + z * z * (linear * _CUBIC)))


@triton.jit
def columns_with_bias(given, block, F, BLOCK_F: tl.constexpr):
    """Return the columns of a block, the mask of the valid ones, and their bias (1, BLOCK_F)."""
    column, inside = block_of_columns(given, block, F, BLOCK_F)
    bias = 0.0
    if given[1] is not None:
        bias = tl.load(given[1] + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return column, inside, bias


@triton.jit
def bias_gelu_forward(given, columns, inverse, row, T, F):
    """Return y and z. ``given``: x (T, F), and the bias (F,) or None."""
    z = load_tile(given[0], row, columns, T, F) + columns[2]
    z = tl.where((row < T)[:, None] & columns[1][None, :], z, 0.0)
    return ((z / _denominator(z), 0),), ((z, 0),)


@triton.jit
def bias_gelu_backward(given, columns, inverse, row, T, F):
    """Return dx. ``given``: x (T, F), or z in FP8; the bias (F,) or None; dy (T, F)."""
    dy = load_tile(given[2], row, columns, T, F)
    z = load_tile(given[0], row, columns, T, F, inverse)
    if inverse is None:
        z += columns[2]
    gate = 1.0 / _denominator(z)
    slope = (1.0 + z * z * (3.0 * _CUBIC)) * _TWICE_SQRT_2_OVER_PI
    return ((dy * gate * (1.0 + z * (1.0 - gate) * slope), 0),), ()


TILES: dict[str, Tile] = {
    "forward": Tile(rows=4, columns=1024, warps=8, programs=0, stages=1),
    "backward": Tile(rows=4, columns=1024, warps=4, programs=4, stages=1),
    "forward to fp8": Tile(rows=8, columns=512, warps=8, programs=8, stages=3),
    "backward to fp8": Tile(rows=16, columns=256, warps=8, programs=4, stages=3),
    "save": Tile(rows=8, columns=512, warps=8, programs=2, stages=3),
}
"""Tiles by pass; ``save`` is the forward pass that also saves FP8 for backward."""


def _launch(*arguments: Any, **options: Any) -> Any:
    return launch(*arguments, columns=columns_with_bias, own_columns=True, **options)


def forward(
    x_TF: Tensor,
    bias_F: Tensor | None,
    *,
    fp8: Scaling | None = None,
    save_fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Activated:
    """Return ``gelu(x + bias)``, (T, F), and the tensor to save for backward.

    See :func:`common.ops.bias_gelu.forward_reference`. One launch.
    """
    require_contiguous(x=x_TF, bias=bias_F)
    tokens, features = x_TF.shape
    y = output(x_TF, features, E4M3, fp8, half=fp8 is None, frozen_scales=frozen_scales)
    saved = output(x_TF, features, E4M3, save_fp8, half=False, frozen_scales=frozen_scales)
    tile = TILES["save" if save_fp8 else "forward to fp8" if fp8 else "forward"]
    _launch(bias_gelu_forward, tile, (x_TF, bias_F), tokens, features, y, saved)
    return Activated(y.half, y.fp8(x_TF.dtype), saved.fp8(x_TF.dtype) or x_TF)


def backward(
    dy_TF: Tensor,
    saved: Tensor | Fp8Tensor,
    bias_F: Tensor | None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Gradients:
    """Return the gradients of x, (T, F), and of the bias, (F,).

    See :func:`common.ops.bias_gelu.backward_reference`. Two launches; only the scale uses atomics.
    """
    dx_TF, dx8, partial = _backward(dy_TF, saved, bias_F, fp8, frozen_scales)
    return Gradients(dx_TF, dx8, column_sums(partial, torch.float32))


def _backward(
    dy_TF: Tensor, saved: Tensor | Fp8Tensor, bias_F: Tensor | None, fp8: Scaling | None, frozen_scales: bool
) -> tuple[Tensor | None, Fp8Tensor | None, Tensor]:
    """Return the gradient of x (T, F), in its dtype or in FP8, and partial sums over tokens, fp32 (programs, F)."""
    if isinstance(saved, Fp8Tensor):
        data, inverse, bias_F = saved.data, saved.scale_inverse, None
    else:
        data, inverse = saved, None
    require_contiguous(dy=dy_TF, saved=data, bias=bias_F)
    tokens, features = dy_TF.shape
    dx = output(dy_TF, features, E5M2, fp8, half=fp8 is None, frozen_scales=frozen_scales)
    tile = TILES["backward to fp8" if fp8 else "backward"]
    given = (data, bias_F, dy_TF)
    partial = _launch(bias_gelu_backward, tile, given, tokens, features, dx, sums=True, inverse=inverse)
    return dx.half, dx.fp8(dy_TF.dtype), partial


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TF: Tensor, bias_F: Tensor, fp8: Scaling | None, handover: Handover | None
    ) -> Tensor | tuple[Tensor | None, ...]:
        x_TF = x_TF.contiguous()
        ctx.save_for_backward(x_TF, bias_F)
        ctx.handover = handover
        y_TF, y8, _ = forward(x_TF, bias_F, fp8=fp8)
        if y8 is not None:
            return fields_for_autograd(ctx, y8)
        assert y_TF is not None
        return y_TF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TF, bias_F = ctx.saved_tensors
        handover = ctx.handover
        scaling = None if handover is None else handover.scaling
        dx_TF, dx8, partial = _backward(gradients[-1].contiguous(), x_TF, bias_F, scaling, False)
        if dx8 is not None:
            dx_TF = handover.leave(dx8)
        return dx_TF, column_sums(partial, bias_F.dtype), None, None


def bias_gelu(
    x_TF: Tensor, bias_F: Tensor, *, fp8: Scaling | None = None, handover: Handover | None = None
) -> Tensor | Fp8Tensor:
    """Return ``gelu(x + bias)``, (T, F), in FP8 if ``fp8``; see :func:`common.ops.bias_gelu.bias_gelu_reference`."""
    result: Any = _BiasGelu.apply(x_TF, bias_F, fp8, handover)
    return result if fp8 is None else Fp8Tensor(*result)
