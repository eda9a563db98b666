"""Tanh GELU after a bias through the Triton kernels of :mod:`common.ops.bias_gelu.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: T tokens, F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.bias_gelu import kernels
from common.ops.fp8_cast import triton as fp8_triton
from common.ops.fp8_cast.plain import E4M3, E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Handover, Scaling
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import multiprocessors


class Tile(NamedTuple):
    """How a pass cuts its (T, F) matrix.

    Attributes:
        rows, columns: of a tile.
        warps: warps of one program.
        programs: programs per multiprocessor, each visiting many tiles; 0 for one tile a program.
    """

    rows: int
    columns: int
    warps: int
    programs: int


TILES: dict[str, Tile] = {"forward": Tile(4, 1024, 8, 0), "backward": Tile(4, 1024, 4, 4)}
"""Pass to its tile. ``bench --sweep`` times others."""
FP8_TILES: dict[str, fp8_triton.Tile] = {
    "forward": fp8_triton.Tile(8, 512, 8, 8, 3),
    "backward": fp8_triton.Tile(16, 256, 8, 4, 3),
}
"""The same of the passes that write FP8."""


def _columns(tile: Tile | fp8_triton.Tile, features: int) -> int:
    return min(tile.columns, triton.next_power_of_2(features))


def _programs(tile: Tile | fp8_triton.Tile, x_TF: Tensor) -> int:
    """Programs of one block of columns."""
    tokens, features = x_TF.shape
    column_blocks = triton.cdiv(features, _columns(tile, features))
    programs = max(1, multiprocessors(x_TF.device) * tile.programs // column_blocks)
    return min(programs, triton.cdiv(tokens, tile.rows))


def _fp8_launch(tile: fp8_triton.Tile, x_TF: Tensor) -> tuple[tuple[int], dict[str, Any]]:
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


def forward(x_TF: Tensor, bias_F: Tensor) -> Tensor:
    """GELU of ``x_TF + bias_F``."""
    tokens, features = x_TF.shape
    tile = TILES["forward"]
    columns = _columns(tile, features)
    y_TF = torch.empty_like(x_TF)
    kernels.bias_gelu_forward_kernel[(triton.cdiv(features, columns) * triton.cdiv(tokens, tile.rows),)](
        x_TF, bias_F, y_TF, tokens, features, BLOCK_T=tile.rows, BLOCK_F=columns, num_warps=tile.warps
    )
    return y_TF


def backward(dy_TF: Tensor, x_TF: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x (T, F), and partial sums of it over tokens, fp32 (programs, F)."""
    tokens, features = x_TF.shape
    tile = TILES["backward"]
    columns, programs = _columns(tile, features), _programs(tile, x_TF)
    dx_TF = torch.empty_like(x_TF)
    partial = x_TF.new_empty((programs, features), dtype=torch.float32)
    kernels.bias_gelu_backward_kernel[(triton.cdiv(features, columns), programs)](
        dy_TF, x_TF, bias_F, dx_TF, partial, tokens, features,
        BLOCK_T=tile.rows, BLOCK_F=columns, num_warps=tile.warps,
    )  # fmt: skip
    return dx_TF, partial


def forward_to_fp8(x_TF: Tensor, bias_F: Tensor, scaling: Scaling) -> Fp8Tensor:
    """GELU of ``x_TF + bias_F`` in e4m3."""
    y8 = fp8_triton.result(scaling, E4M3, x_TF.shape)
    grid, constants = _fp8_launch(FP8_TILES["forward"], x_TF)
    kernels.bias_gelu_forward_to_fp8_kernel[grid](x_TF, bias_F, *y8.arguments(), *x_TF.shape, **constants)
    return y8.tensor(x_TF.dtype)


def backward_to_fp8(dy_TF: Tensor, x_TF: Tensor, bias_F: Tensor, scaling: Scaling) -> tuple[Fp8Tensor, Tensor]:
    """Gradient of x in e5m2, and the partial sums of :func:`backward`."""
    dx8 = fp8_triton.result(scaling, E5M2, x_TF.shape)
    tile = FP8_TILES["backward"]
    grid, constants = _fp8_launch(tile, x_TF)
    partial = x_TF.new_empty((_programs(tile, x_TF), x_TF.shape[1]), dtype=torch.float32)
    kernels.bias_gelu_backward_to_fp8_kernel[grid](
        dy_TF, x_TF, bias_F, *dx8.arguments(), partial, *x_TF.shape, **constants
    )
    return dx8.tensor(x_TF.dtype), partial


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TF: Tensor, bias_F: Tensor, fp8: Scaling | None, handover: Handover | None
    ) -> Tensor | tuple[Tensor | None, ...]:
        x_TF = x_TF.contiguous()
        ctx.save_for_backward(x_TF, bias_F)
        ctx.handover = handover
        if fp8 is None:
            return forward(x_TF, bias_F)
        return fp8_triton.outputs(ctx, forward_to_fp8(x_TF, bias_F, fp8))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TF, bias_F = ctx.saved_tensors
        dy_TF, handover = gradients[-1].contiguous(), ctx.handover
        if handover is None or handover.scaling is None:
            dx_TF, partial = backward(dy_TF, x_TF, bias_F)
        else:
            dx8, partial = backward_to_fp8(dy_TF, x_TF, bias_F, handover.scaling)
            dx_TF = handover.leave(dx8)
        return dx_TF, column_sums(partial, bias_F.dtype), None, None


def bias_gelu(
    x_TF: Tensor, bias_F: Tensor, *, fp8: Scaling | None = None, handover: Handover | None = None
) -> Tensor | Fp8Tensor:
    """See :func:`common.ops.bias_gelu.plain.bias_gelu_torch`."""
    result: Any = _BiasGelu.apply(x_TF, bias_F, fp8, handover)
    return result if fp8 is None else Fp8Tensor(*result)
