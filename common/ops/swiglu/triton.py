"""SwiGLU through the Triton kernels of :mod:`common.ops.swiglu.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: T tokens, F features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Scaling
from common.ops.fp8_cast.triton import arguments, result
from common.ops.swiglu import kernels
from common.ops.swiglu.reference import Activated
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors, require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(rows=1, columns=2048, warps=4, programs=8, stages=1),
    "backward": Tile(rows=1, columns=2048, warps=4, programs=8, stages=1),
}
"""Pass to its tile."""


def _launch(tile: Tile, tokens: int, features: int, device: torch.device) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a pass."""
    columns = min(tile.columns, triton.next_power_of_2(features))
    tiles = triton.cdiv(tokens, tile.rows) * triton.cdiv(features, columns)
    return (min(tiles, tile.programs * multiprocessors(device)),), {
        "SAMPLED_ROWS": SAMPLED_ROWS_OF_COMPUTED,
        "BLOCK_T": tile.rows,
        "BLOCK_F": columns,
        "GROUP": min(8, columns),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def forward(
    gate_up_T2F: Tensor,
    *,
    fp8: Scaling | None = None,
    save_fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Activated:
    """See :func:`common.ops.swiglu.reference.forward_reference`. One launch."""
    require_contiguous(gate_up=gate_up_T2F)
    tokens, features = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    y8 = None if fp8 is None else result(fp8, E4M3, (tokens, features))
    y_TF = gate_up_T2F.new_empty((tokens, features)) if y8 is None else None
    saved = None if save_fp8 is None else result(save_fp8, E4M3, gate_up_T2F.shape)
    grid, constants = _launch(TILES["forward"], tokens, features, gate_up_T2F.device)
    kernels.swiglu_forward_kernel[grid](
        gate_up_T2F, y_TF, *arguments(y8), *arguments(saved), tokens, features,
        FP8=y8 is not None, SAVE=saved is not None, FROZEN=frozen_scales, **constants,
    )  # fmt: skip
    dtype = gate_up_T2F.dtype
    return Activated(
        y_TF, None if y8 is None else y8.tensor(dtype), gate_up_T2F if saved is None else saved.tensor(dtype)
    )


def backward(
    dy_TF: Tensor, saved: Tensor | Fp8Tensor, *, fp8: Scaling | None = None, frozen_scales: bool = False
) -> tuple[Tensor | None, Fp8Tensor | None]:
    """See :func:`common.ops.swiglu.reference.backward_reference`. One launch."""
    tokens, features = dy_TF.shape
    if isinstance(saved, Fp8Tensor):
        data, saved_inverse = saved.data.view(torch.uint8), saved.scale_inverse
    else:
        data, saved_inverse = saved, None
    require_contiguous(dy=dy_TF, saved=data)
    d_gate_up8 = None if fp8 is None else result(fp8, E5M2, (tokens, 2 * features))
    d_gate_up_T2F = dy_TF.new_empty((tokens, 2 * features)) if d_gate_up8 is None else None
    grid, constants = _launch(TILES["backward"], tokens, features, dy_TF.device)
    kernels.swiglu_backward_kernel[grid](
        dy_TF, data, saved_inverse, d_gate_up_T2F, *arguments(d_gate_up8), tokens, features,
        FP8=d_gate_up8 is not None, SAVED_FP8=saved_inverse is not None, FROZEN=frozen_scales, **constants,
    )  # fmt: skip
    return d_gate_up_T2F, None if d_gate_up8 is None else d_gate_up8.tensor(dy_TF.dtype)
