"""Residual addition and RMSNorm through the Triton kernels of :mod:`common.ops.rms_norm.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: T tokens, E features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Scaling
from common.ops.fp8_cast.triton import arguments, result
from common.ops.rms_norm import kernels
from common.ops.rms_norm.reference import Normed
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import multiprocessors, require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(rows=1, warps=8, programs=4, stages=1),
    "backward": Tile(rows=1, warps=4, programs=8, stages=1),
    "recompute": Tile(rows=4, columns=1024, warps=4),
    "weight_gradient": Tile(rows=8, columns=256, warps=4),
}
"""Pass to its tile."""

_PROGRAMS_OF_SUMS = 8
"""Programs per multiprocessor that add up the gradient of the weight."""

_ROW_OF_TILES = 8192
"""Features that the tiles of whole rows are meant for; narrower rows take as many more at a time, up to 8."""


def _launch(tile: Tile, x_TE: Tensor, fp8: bool, frozen_scales: bool) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a pass over whole rows."""
    tokens, features = x_TE.shape
    block = triton.next_power_of_2(features)
    rows = tile.rows * min(8, max(1, _ROW_OF_TILES // block))
    programs = min(triton.cdiv(tokens, rows), tile.programs * multiprocessors(x_TE.device))
    return (programs,), {
        "E": features,
        "FP8": fp8,
        "FROZEN": frozen_scales,
        "SAMPLED_ROWS": SAMPLED_ROWS_OF_COMPUTED,
        "ROWS": rows,
        "BLOCK_E": block,
        "GROUP": min(8, block),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def forward(
    residual_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
    epsilon: float,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Normed:
    """See :func:`common.ops.rms_norm.reference.forward_reference`. One launch."""
    require_contiguous(residual=residual_TE, delta=delta_TE, weight=weight_E)
    sum_TE = residual_TE if delta_TE is None else torch.empty_like(residual_TE)
    inverse_rms_T = residual_TE.new_empty(residual_TE.shape[0], dtype=torch.float32)
    y_TE = torch.empty_like(residual_TE) if half else None
    y8 = None if fp8 is None else result(fp8, E4M3, residual_TE.shape)
    grid, constants = _launch(TILES["forward"], residual_TE, y8 is not None, frozen_scales)
    kernels.rms_norm_forward_kernel[grid](
        residual_TE, delta_TE, weight_E, sum_TE, inverse_rms_T, y_TE, *arguments(y8), residual_TE.shape[0], epsilon,
        DELTA=delta_TE is not None, HALF=half, **constants,
    )  # fmt: skip
    return Normed(sum_TE, inverse_rms_T, y_TE, None if y8 is None else y8.tensor(residual_TE.dtype))


def backward(
    dy_TE: Tensor,
    residual_TE: Tensor,
    inverse_rms_T: Tensor,
    weight_E: Tensor,
    d_residual_TE: Tensor | None = None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor, Fp8Tensor | None]:
    """See :func:`common.ops.rms_norm.reference.backward_reference`. One launch."""
    require_contiguous(dy=dy_TE, residual=residual_TE, weight=weight_E, d_residual=d_residual_TE)
    dx_TE = torch.empty_like(dy_TE)
    dx8 = None if fp8 is None else result(fp8, E5M2, dy_TE.shape)
    grid, constants = _launch(TILES["backward"], dy_TE, dx8 is not None, frozen_scales)
    kernels.rms_norm_backward_kernel[grid](
        dy_TE, residual_TE, inverse_rms_T, weight_E, d_residual_TE, dx_TE, *arguments(dx8), dy_TE.shape[0],
        RESIDUAL=d_residual_TE is not None, **constants,
    )  # fmt: skip
    return dx_TE, None if dx8 is None else dx8.tensor(dy_TE.dtype)


def recompute(residual_TE: Tensor, inverse_rms_T: Tensor, weight_E: Tensor) -> Tensor:
    """See :func:`common.ops.rms_norm.reference.recompute_reference`."""
    require_contiguous(residual=residual_TE, weight=weight_E)
    tokens, features = residual_TE.shape
    tile = TILES["recompute"]
    columns = min(tile.columns, triton.next_power_of_2(features))
    y_TE = torch.empty_like(residual_TE)
    kernels.rms_norm_recompute_kernel[(triton.cdiv(tokens, tile.rows) * triton.cdiv(features, columns),)](
        residual_TE, inverse_rms_T, weight_E, y_TE, tokens, features,
        ROWS=tile.rows, BLOCK_E=columns, num_warps=tile.warps,
    )  # fmt: skip
    return y_TE


def weight_gradient(dy_TE: Tensor, residual_TE: Tensor, inverse_rms_T: Tensor) -> Tensor:
    """See :func:`common.ops.rms_norm.reference.weight_gradient_reference`. Two launches."""
    require_contiguous(dy=dy_TE, residual=residual_TE)
    tokens, features = residual_TE.shape
    tile = TILES["weight_gradient"]
    columns = min(tile.columns, triton.next_power_of_2(features))
    blocks = triton.cdiv(features, columns)
    most = max(1, _PROGRAMS_OF_SUMS * multiprocessors(dy_TE.device) // blocks)
    programs = min(most, max(1, triton.cdiv(tokens, tile.rows)))
    partial_PE = torch.empty((programs, features), dtype=torch.float32, device=dy_TE.device)
    kernels.rms_norm_weight_gradient_kernel[(blocks, programs)](
        dy_TE, residual_TE, inverse_rms_T, partial_PE, tokens, features,
        ROWS=tile.rows, BLOCK_E=columns, num_warps=tile.warps,
    )  # fmt: skip
    return column_sums(partial_PE, torch.float32)
