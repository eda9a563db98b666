"""Residual addition and LayerNorm through the Triton kernels of :mod:`common.ops.layer_norm_1p.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: T tokens, E features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Scaling
from common.ops.fp8_cast.triton import arguments, result
from common.ops.layer_norm_1p import kernels
from common.ops.layer_norm_1p.reference import Normed, ParameterGradients
from common.ops.norm.parted_rows import launch
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import multiprocessors, require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(rows=1, warps=16, programs=1, stages=3),
    "backward": Tile(rows=1, warps=16, programs=1, stages=3),
}
"""Pass over whole rows to its tile."""

BLOCK_TILES: dict[str, Tile] = {
    "recompute": Tile(rows=4, columns=1024, warps=4, programs=0),
    "parameter_gradients": Tile(rows=8, columns=256, warps=4, programs=8),
}
"""The same of the passes that don't look at whole rows."""


def _launch(
    name: str, read: Sequence[Tensor | None], fp8: bool, frozen_scales: bool
) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a pass over whole rows."""
    grid, constants = launch(TILES[name], read)
    constants |= {
        "FP8": fp8,
        "FROZEN": frozen_scales,
        "SAMPLED_ROWS": SAMPLED_ROWS_OF_COMPUTED,
        "GROUP": min(8, constants["BLOCK"]),
    }
    return grid, constants


def forward(
    residual_TE: Tensor,
    delta_TE: Tensor | None,
    added_E: Tensor | None,
    weight_E: Tensor,
    bias_E: Tensor,
    epsilon: float,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Normed:
    """See :func:`common.ops.layer_norm_1p.reference.forward_reference`. One launch."""
    require_contiguous(residual=residual_TE, delta=delta_TE, added=added_E, weight=weight_E, bias=bias_E)
    unchanged = delta_TE is None and added_E is None
    sum_TE = residual_TE if unchanged else torch.empty_like(residual_TE)
    moments_2T = residual_TE.new_empty((2, residual_TE.shape[0]), dtype=torch.float32)
    y_TE = torch.empty_like(residual_TE) if half else None
    y8 = None if fp8 is None else result(fp8, E4M3, residual_TE.shape)
    grid, constants = _launch("forward", (residual_TE, delta_TE), y8 is not None, frozen_scales)
    kernels.layer_norm_1p_forward_kernel[grid](
        residual_TE, delta_TE, added_E, weight_E, bias_E, sum_TE, moments_2T, y_TE, *arguments(y8),
        residual_TE.shape[0], epsilon,
        DELTA=delta_TE is not None, ADDED=added_E is not None, HALF=half, **constants,
    )  # fmt: skip
    return Normed(sum_TE, moments_2T, y_TE, None if y8 is None else y8.tensor(residual_TE.dtype))


def backward(
    dy_TE: Tensor,
    residual_TE: Tensor,
    moments_2T: Tensor,
    weight_E: Tensor,
    d_residual_TE: Tensor | None = None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor, Fp8Tensor | None]:
    """See :func:`common.ops.layer_norm_1p.reference.backward_reference`. One launch."""
    require_contiguous(dy=dy_TE, residual=residual_TE, moments=moments_2T, weight=weight_E, d_residual=d_residual_TE)
    dx_TE = torch.empty_like(dy_TE)
    dx8 = None if fp8 is None else result(fp8, E5M2, dy_TE.shape)
    grid, constants = _launch("backward", (dy_TE, residual_TE, d_residual_TE), dx8 is not None, frozen_scales)
    kernels.layer_norm_1p_backward_kernel[grid](
        dy_TE, residual_TE, moments_2T, weight_E, d_residual_TE, dx_TE, *arguments(dx8), dy_TE.shape[0],
        RESIDUAL=d_residual_TE is not None, **constants,
    )  # fmt: skip
    return dx_TE, None if dx8 is None else dx8.tensor(dy_TE.dtype)


def recompute(residual_TE: Tensor, moments_2T: Tensor, weight_E: Tensor, bias_E: Tensor) -> Tensor:
    """See :func:`common.ops.layer_norm_1p.reference.recompute_reference`."""
    require_contiguous(residual=residual_TE, moments=moments_2T, weight=weight_E, bias=bias_E)
    tokens, features = residual_TE.shape
    block = BLOCK_TILES["recompute"]
    columns = min(block.columns, triton.next_power_of_2(features))
    y_TE = torch.empty_like(residual_TE)
    kernels.layer_norm_1p_recompute_kernel[(triton.cdiv(tokens, block.rows) * triton.cdiv(features, columns),)](
        residual_TE, moments_2T, weight_E, bias_E, y_TE, tokens, features,
        ROWS=block.rows, BLOCK_E=columns, num_warps=block.warps,
    )  # fmt: skip
    return y_TE


def parameter_gradients(
    dy_TE: Tensor, residual_TE: Tensor, moments_2T: Tensor, dx_TE: Tensor | None = None
) -> ParameterGradients:
    """See :func:`common.ops.layer_norm_1p.reference.parameter_gradients_reference`. Two launches, no atomics."""
    require_contiguous(dy=dy_TE, residual=residual_TE, moments=moments_2T, dx=dx_TE)
    tokens, features = residual_TE.shape
    kinds = 2 if dx_TE is None else 3
    block = BLOCK_TILES["parameter_gradients"]
    columns = min(block.columns, triton.next_power_of_2(features))
    column_blocks = triton.cdiv(features, columns)
    most = max(1, block.programs * multiprocessors(dy_TE.device) // column_blocks)
    programs = min(most, max(1, triton.cdiv(tokens, block.rows)))
    partial = torch.empty((programs, kinds * features), dtype=torch.float32, device=dy_TE.device)
    kernels.layer_norm_1p_parameter_gradients_kernel[(column_blocks, programs)](
        dy_TE, residual_TE, moments_2T, dx_TE, partial, tokens, features,
        ADDED=dx_TE is not None, ROWS=block.rows, BLOCK_E=columns, num_warps=block.warps,
    )  # fmt: skip
    of_weight, of_bias, *of_added = column_sums(partial, torch.float32).view(kinds, features).unbind()
    return ParameterGradients(of_weight, of_bias, of_added[0] if of_added else None)
