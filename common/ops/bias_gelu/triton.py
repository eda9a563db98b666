"""Tanh GELU after a bias through the Triton kernels of :mod:`common.ops.bias_gelu.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: T tokens, F features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.bias_gelu import kernels
from common.ops.bias_gelu.reference import Activated, Gradients
from common.ops.fp8_cast import triton as fp8_triton
from common.ops.fp8_cast.reference import E4M3, E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Handover, Scaling
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import multiprocessors, require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(rows=4, columns=1024, warps=8, programs=0),
    "backward": Tile(rows=4, columns=1024, warps=4, programs=4),
}
"""Pass to its tile."""
FP8_TILES: dict[str, Tile] = {
    "forward": Tile(rows=8, columns=512, warps=8, programs=8, stages=3),
    "backward": Tile(rows=16, columns=256, warps=8, programs=4, stages=3),
    "save": Tile(rows=8, columns=512, warps=8, programs=2, stages=3),
}
"""The same of the passes that write FP8; ``save`` is forward where it leaves FP8 for backward."""


def _columns(tile: Tile, features: int) -> int:
    return min(tile.columns, triton.next_power_of_2(features))


def _programs(tile: Tile, x_TF: Tensor) -> int:
    """Programs of one block of columns."""
    tokens, features = x_TF.shape
    column_blocks = triton.cdiv(features, _columns(tile, features))
    programs = max(1, multiprocessors(x_TF.device) * tile.programs // column_blocks)
    return min(programs, triton.cdiv(tokens, tile.rows))


def _fp8_launch(tile: Tile, x_TF: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a pass that writes FP8."""
    columns = _columns(tile, x_TF.shape[1])
    return (triton.cdiv(x_TF.shape[1], columns) * _programs(tile, x_TF),), {
        "SAMPLED_ROWS": SAMPLED_ROWS_OF_COMPUTED,
        "BLOCK_T": tile.rows,
        "BLOCK_F": columns,
        "GROUP": min(8, columns),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


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
    y8 = None if fp8 is None else fp8_triton.result(fp8, E4M3, x_TF.shape)
    saved = None if save_fp8 is None else fp8_triton.result(save_fp8, E4M3, x_TF.shape)
    y_TF = torch.empty_like(x_TF) if y8 is None else None
    if y8 is None and saved is None:
        tile = TILES["forward"]
        columns = _columns(tile, features)
        kernels.bias_gelu_forward_kernel[(triton.cdiv(features, columns) * triton.cdiv(tokens, tile.rows),)](
            x_TF, bias_F, y_TF, tokens, features,
            BIAS=bias_F is not None, BLOCK_T=tile.rows, BLOCK_F=columns, num_warps=tile.warps,
        )  # fmt: skip
        return Activated(y_TF, None, x_TF)
    grid, constants = _fp8_launch(FP8_TILES["forward" if saved is None else "save"], x_TF)
    kernels.bias_gelu_forward_to_fp8_kernel[grid](
        x_TF, bias_F, y_TF, *fp8_triton.arguments(y8), *fp8_triton.arguments(saved), tokens, features,
        BIAS=bias_F is not None, FP8=y8 is not None, SAVE=saved is not None, FROZEN=frozen_scales, **constants,
    )  # fmt: skip
    dtype = x_TF.dtype
    return Activated(y_TF, None if y8 is None else y8.tensor(dtype), x_TF if saved is None else saved.tensor(dtype))


def backward(
    dy_TF: Tensor,
    saved: Tensor | Fp8Tensor,
    bias_F: Tensor | None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Gradients:
    """See :func:`common.ops.bias_gelu.reference.backward_reference`. Two launches, no atomics but for the scale."""
    dx_TF, dx8, partial = _backward(dy_TF, saved, bias_F, fp8, frozen_scales)
    return Gradients(dx_TF, dx8, column_sums(partial, torch.float32))


def _backward(
    dy_TF: Tensor, saved: Tensor | Fp8Tensor, bias_F: Tensor | None, fp8: Scaling | None, frozen_scales: bool
) -> tuple[Tensor | None, Fp8Tensor | None, Tensor]:
    """Gradient of x (T, F) in one form, and partial sums of it over tokens, fp32 (programs, F)."""
    tokens, features = dy_TF.shape
    if isinstance(saved, Fp8Tensor):
        data, saved_inverse, bias_F = saved.data.view(torch.uint8), saved.scale_inverse, None
    else:
        data, saved_inverse = saved, None
    require_contiguous(dy=dy_TF, saved=data, bias=bias_F)
    options = {"BIAS": bias_F is not None, "SAVED_FP8": saved_inverse is not None}
    tile = TILES["backward"] if fp8 is None else FP8_TILES["backward"]
    programs = _programs(tile, dy_TF)
    partial = dy_TF.new_empty((programs, features), dtype=torch.float32)
    if fp8 is None:
        columns, dx_TF = _columns(tile, features), torch.empty_like(dy_TF)
        kernels.bias_gelu_backward_kernel[(triton.cdiv(features, columns), programs)](
            dy_TF, data, saved_inverse, bias_F, dx_TF, partial, tokens, features,
            **options, BLOCK_T=tile.rows, BLOCK_F=columns, num_warps=tile.warps,
        )  # fmt: skip
        return dx_TF, None, partial
    dx8 = fp8_triton.result(fp8, E5M2, dy_TF.shape)
    grid, constants = _fp8_launch(FP8_TILES["backward"], dy_TF)
    kernels.bias_gelu_backward_to_fp8_kernel[grid](
        dy_TF, data, saved_inverse, bias_F, *dx8.arguments(), partial, tokens, features,
        **options, FROZEN=frozen_scales, **constants,
    )  # fmt: skip
    return None, dx8.tensor(dy_TF.dtype), partial


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
            return fp8_triton.outputs(ctx, y8)
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
