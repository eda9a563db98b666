"""Launches of the Triton kernels of :mod:`common.ops.row_norm.kernels`. Shapes: T tokens, E features."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling
from common.ops.fp8_cast.triton import output
from common.ops.row_norm import Normed, kernels
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import programs_for, require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(rows=1, warps=16, programs=1, stages=3),
    "backward": Tile(rows=1, warps=16, programs=1, stages=3),
    "RMSNorm forward": Tile(rows=1, warps=8, programs=4, stages=1),
    "RMSNorm backward": Tile(rows=1, warps=4, programs=8, stages=1),
    "recompute": Tile(rows=4, columns=1024, warps=4),
    "parameter_gradients": Tile(rows=8, columns=256, warps=4, programs=8),
}
"""Tile of each pass."""

_MOST_PARTS = 5

_ROW_OF_TILES = 8192
"""Features per row for which the tiles of whole rows are meant. Programs hold up to 8 times as many narrower rows."""

_SHARED_FOR_SUMS = 8 << 10
"""Bytes of shared memory besides the rows in flight, through which warps exchange their sums."""


def _parts(features: int) -> tuple[int, int]:
    """Return the number of parts of a row and the columns of each: the least padding, then the fewest parts."""
    choices = [
        (number, triton.next_power_of_2(triton.cdiv(features, number))) for number in range(1, _MOST_PARTS + 1, 2)
    ]
    return min(choices, key=lambda parts: (parts[0] * parts[1], parts[0]))


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the shared memory of a program in bytes; that of a Hopper GPU if kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def _rows(name: str, mean: bool, read: Sequence[Tensor | None]) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the constants of a pass over whole rows.

    Args:
        mean: True for LayerNorm, False for RMSNorm.
        read: matrices (T, E) whose whole rows a program reads; the first is not None. If shared memory is too small
            for the rows in flight, the pass has fewer stages.
    """
    given = [x for x in read if x is not None]
    device, (tokens, features) = given[0].device, given[0].shape
    tile = TILES[name if mean else f"RMSNorm {name}"]
    parts, columns = _parts(features)
    rows = tile.rows * min(8, max(1, _ROW_OF_TILES // (parts * columns)))
    rows = 1 << (rows.bit_length() - 1)
    in_flight = rows * parts * columns * sum(x.element_size() for x in given)
    return (programs_for(triton.cdiv(tokens, rows), tile.programs, device),), {
        "MEAN": mean,
        "E": features,
        "PARTS": parts,
        "ROWS": rows,
        "BLOCK": columns,
        "STAGES": min(tile.stages, 1 + (_shared_memory(device) - _SHARED_FOR_SUMS) // in_flight),
        "num_warps": tile.warps,
    }


def _blocks(tile: Tile, features: int) -> dict[str, int]:
    """Return the constants of a pass whose programs hold some of the columns."""
    columns = min(tile.columns, triton.next_power_of_2(features))
    parts = triton.cdiv(features, columns)
    return {"E": features, "PARTS": parts, "ROWS": tile.rows, "BLOCK": columns, "num_warps": tile.warps}


def forward(
    residual_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
    epsilon: float,
    bias_E: Tensor | None = None,
    added_E: Tensor | None = None,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Normed:
    """Add to the residual and normalise the sum, in one launch.

    See :func:`common.ops.row_norm.forward_reference`.
    """
    require_contiguous(residual=residual_TE, delta=delta_TE, added=added_E, weight=weight_E, bias=bias_E)
    tokens, mean = residual_TE.shape[0], bias_E is not None
    unchanged = delta_TE is None and added_E is None
    sum_TE = residual_TE if unchanged else torch.empty_like(residual_TE)
    moments = residual_TE.new_empty((2, tokens) if mean else (tokens,), dtype=torch.float32)
    y = output(residual_TE, residual_TE.shape[1], E4M3, fp8, half=half, frozen_scales=frozen_scales)
    grid, constants = _rows("forward", mean, (residual_TE, delta_TE))
    kernels.row_norm_forward_kernel[grid](
        residual_TE, delta_TE, added_E, weight_E, bias_E, None if unchanged else sum_TE, moments, y.half, *y.pointers(),
        tokens, epsilon, FROZEN=frozen_scales, **constants,
    )  # fmt: skip
    return Normed(sum_TE, moments, y.half, y.fp8(residual_TE.dtype))


def backward(
    dy_TE: Tensor,
    residual_TE: Tensor,
    moments: Tensor,
    weight_E: Tensor,
    d_residual_TE: Tensor | None = None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor, Fp8Tensor | None]:
    """Return the gradient of the sum, (T, E), in the dtype of ``dy_TE`` and in FP8 (or None).

    See :func:`common.ops.row_norm.backward_reference`. One launch.
    """
    require_contiguous(dy=dy_TE, residual=residual_TE, moments=moments, weight=weight_E, d_residual=d_residual_TE)
    dx = output(dy_TE, dy_TE.shape[1], E5M2, fp8, half=True, frozen_scales=frozen_scales)
    grid, constants = _rows("backward", moments.dim() == 2, (dy_TE, residual_TE, d_residual_TE))
    kernels.row_norm_backward_kernel[grid](
        dy_TE, residual_TE, moments, weight_E, d_residual_TE, dx.half, *dx.pointers(), dy_TE.shape[0],
        FROZEN=frozen_scales, **constants,
    )  # fmt: skip
    assert dx.half is not None
    return dx.half, dx.fp8(dy_TE.dtype)


def recompute(residual_TE: Tensor, moments: Tensor, weight_E: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Return y, (T, E), recomputed; see :func:`common.ops.row_norm.recompute_reference`. One launch."""
    require_contiguous(residual=residual_TE, moments=moments, weight=weight_E, bias=bias_E)
    tokens, features = residual_TE.shape
    constants = _blocks(TILES["recompute"], features)
    y_TE = torch.empty_like(residual_TE)
    kernels.row_norm_recompute_kernel[(triton.cdiv(tokens, constants["ROWS"]) * constants["PARTS"],)](
        residual_TE, moments, weight_E, bias_E, y_TE, tokens, MEAN=bias_E is not None, **constants
    )
    return y_TE


def parameter_gradients(
    dy_TE: Tensor, residual_TE: Tensor, moments: Tensor, dx_TE: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of weight, of bias (LayerNorm) and of ``added_E``, (E,) each, fp32.

    See :func:`common.ops.row_norm.parameter_gradients_reference`. Two launches, no atomics.
    """
    require_contiguous(dy=dy_TE, residual=residual_TE, moments=moments, dx=dx_TE)
    tokens, features = residual_TE.shape
    tile, kinds = TILES["parameter_gradients"], moments.dim() + (dx_TE is not None)
    constants = _blocks(tile, features)
    groups = triton.cdiv(tokens, tile.rows)
    programs = max(1, programs_for(groups, tile.programs, dy_TE.device, constants["PARTS"]))
    partial = torch.empty((programs, kinds * features), dtype=torch.float32, device=dy_TE.device)
    kernels.row_norm_parameter_gradients_kernel[(constants["PARTS"], programs)](
        dy_TE, residual_TE, moments, dx_TE, partial, tokens, KINDS=kinds, MEAN=moments.dim() == 2, **constants
    )
    return column_sums(partial, torch.float32).view(kinds, features).unbind()
