"""Tanh GELU after a bias through the Triton kernels of :mod:`common.ops.bias_gelu.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: T tokens, F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.bias_gelu import kernels
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


def _columns(tile: Tile, features: int) -> int:
    return min(tile.columns, triton.next_power_of_2(features))


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
    columns = _columns(tile, features)
    column_blocks = triton.cdiv(features, columns)
    programs = max(1, multiprocessors(x_TF.device) * tile.programs // column_blocks)
    programs = min(programs, triton.cdiv(tokens, tile.rows))
    dx_TF = torch.empty_like(x_TF)
    partial = x_TF.new_empty((programs, features), dtype=torch.float32)
    kernels.bias_gelu_backward_kernel[(column_blocks, programs)](
        dy_TF, x_TF, bias_F, dx_TF, partial, tokens, features,
        BLOCK_T=tile.rows, BLOCK_F=columns, num_warps=tile.warps,
    )  # fmt: skip
    return dx_TF, partial


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, bias_F: Tensor) -> Tensor:
        x_TF = x_TF.contiguous()
        ctx.save_for_backward(x_TF, bias_F)
        return forward(x_TF, bias_F)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x_TF, bias_F = ctx.saved_tensors
        dx_TF, partial = backward(gradients[0].contiguous(), x_TF, bias_F)
        return dx_TF, column_sums(partial, bias_F.dtype)


def bias_gelu(x_TF: Tensor, bias_F: Tensor) -> Tensor:
    """See :func:`common.ops.bias_gelu.plain.bias_gelu_torch`."""
    result: Tensor = _BiasGelu.apply(x_TF, bias_F)
    return result
