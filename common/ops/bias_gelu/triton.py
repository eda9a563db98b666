"""Tanh GELU after a bias with the Triton kernels of :mod:`common.ops.bias_gelu.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: T tokens, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.bias_gelu import kernels
from common.ops.bias_gelu.reference import Activated, Gradients
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Handover, Scaling
from common.ops.fp8_cast.triton import fields_for_autograd, launch, output
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(rows=4, columns=1024, warps=8, programs=0, stages=1),
    "backward": Tile(rows=4, columns=1024, warps=4, programs=4, stages=1),
    "forward to fp8": Tile(rows=8, columns=512, warps=8, programs=8, stages=3),
    "backward to fp8": Tile(rows=16, columns=256, warps=8, programs=4, stages=3),
    "save": Tile(rows=8, columns=512, warps=8, programs=2, stages=3),
}
"""Tiles by pass; ``save`` is the forward pass that also saves FP8 for backward."""


def _launch(*arguments: Any, **options: Any) -> Any:
    return launch(*arguments, columns=kernels.columns_with_bias, own_columns=True, **options)


def forward(
    x_TF: Tensor,
    bias_F: Tensor | None,
    *,
    fp8: Scaling | None = None,
    save_fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Activated:
    """See :func:`common.ops.bias_gelu.reference.forward_reference`. One launch."""
    require_contiguous(x=x_TF, bias=bias_F)
    tokens, features = x_TF.shape
    y = output(x_TF, features, E4M3, fp8, half=fp8 is None, frozen_scales=frozen_scales)
    saved = output(x_TF, features, E4M3, save_fp8, half=False, frozen_scales=frozen_scales)
    tile = TILES["save" if save_fp8 else "forward to fp8" if fp8 else "forward"]
    _launch(kernels.bias_gelu_forward, tile, (x_TF, bias_F), tokens, features, y, saved)
    return Activated(y.half, y.fp8(x_TF.dtype), saved.fp8(x_TF.dtype) or x_TF)


def backward(
    dy_TF: Tensor,
    saved: Tensor | Fp8Tensor,
    bias_F: Tensor | None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Gradients:
    """See :func:`common.ops.bias_gelu.reference.backward_reference`. Two launches; only the scale uses atomics."""
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
    partial = _launch(kernels.bias_gelu_backward, tile, given, tokens, features, dx, sums=True, inverse=inverse)
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
    """See :func:`common.ops.bias_gelu.reference.bias_gelu_reference`."""
    result: Any = _BiasGelu.apply(x_TF, bias_F, fp8, handover)
    return result if fp8 is None else Fp8Tensor(*result)
