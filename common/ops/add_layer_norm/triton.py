"""Residual addition and LayerNorm with the Triton kernels of :mod:`common.ops.add_layer_norm.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Shapes: R rows, C features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.add_layer_norm import kernels
from common.ops.norm.row_programs import row_programs
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(elements=4096, warps=2, programs=0),
    "backward": Tile(elements=2048, warps=2, programs=8),
}
"""Tiles by pass. Here ``elements`` are those of the rows that a program holds at a time."""

_MOST_WARPS = 16


def _launch(tile: Tile, x_RC: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the size arguments of a pass."""
    rows, features = x_RC.shape
    block = triton.next_power_of_2(features)
    held = max(1, tile.elements // block)
    warps = min(tile.warps * max(1, block // tile.elements), _MOST_WARPS)
    arguments = {"C": features, "ROWS": held, "BLOCK_C": block, "num_warps": warps}
    return (row_programs(rows, held, tile.programs, x_RC.device),), arguments


def forward(
    x_RC: Tensor, residual_RC: Tensor | None, added_C: Tensor | None, weight_C: Tensor, bias_C: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum, the normalised sum, and mean and 1 / standard deviation of each row, fp32 (2, R). One launch."""
    require_contiguous(added=added_C, weight=weight_C, bias=bias_C)
    nothing_added = residual_RC is None and added_C is None
    sum_RC = x_RC if nothing_added else torch.empty_like(x_RC)
    normed_RC = torch.empty_like(x_RC)
    moments_2R = x_RC.new_empty((2, x_RC.shape[0]), dtype=torch.float32)
    grid, arguments = _launch(TILES["forward"], x_RC)
    kernels.add_layer_norm_forward_kernel[grid](
        x_RC, residual_RC, added_C, weight_C, bias_C, sum_RC, normed_RC, moments_2R, x_RC.shape[0], eps,
        RESIDUAL=residual_RC is not None, ADDED=added_C is not None, **arguments,
    )  # fmt: skip
    return sum_RC, normed_RC, moments_2R


def backward(
    d_sum_RC: Tensor | None, d_normed_RC: Tensor, sum_RC: Tensor, weight_C: Tensor, moments_2R: Tensor, added: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the sum and of the parameters in one launch.

    Args:
        d_sum_RC: gradient of the sum from its other users, or None.
        d_normed_RC: gradient of the normalised sum.
        sum_RC, weight_C, moments_2R: results and weight of the forward pass.
        added: whether a vector was added to every row.

    Returns:
        The total gradient of the sum, (R, C), and partial sums, fp32 (programs, K * C): K = 2 for weight and bias, or 3
        with the ``added`` vector.
    """
    dx_RC = torch.empty_like(sum_RC)
    grid, arguments = _launch(TILES["backward"], sum_RC)
    partial = moments_2R.new_empty((grid[0], (3 if added else 2) * sum_RC.shape[1]))
    kernels.add_layer_norm_backward_kernel[grid](
        d_sum_RC, d_normed_RC, sum_RC, weight_C, moments_2R, dx_RC, partial, sum_RC.shape[0],
        READ=d_sum_RC is not None, ADDED=added, **arguments,
    )  # fmt: skip
    return dx_RC, partial


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RC: Tensor, residual_RC: Tensor | None, added_C: Tensor | None, weight_C: Tensor, bias_C: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x_RC = x_RC.contiguous()
        residual_RC = None if residual_RC is None else residual_RC.contiguous()
        sum_RC, normed_RC, moments_2R = forward(x_RC, residual_RC, added_C, weight_C, bias_C, eps)
        ctx.save_for_backward(sum_RC, weight_C, moments_2R)
        ctx.set_materialize_grads(False)
        ctx.residual = residual_RC is not None
        ctx.dtypes = [weight_C.dtype, bias_C.dtype, *([] if added_C is None else [added_C.dtype])]
        return sum_RC, normed_RC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_sum_RC, d_normed_RC = (None if given is None else given.contiguous() for given in gradients)
        added = len(ctx.dtypes) == 3
        if d_normed_RC is None:  # the normalised rows are not used
            d_added_C = (
                d_sum_RC.sum(0, dtype=torch.float32).to(ctx.dtypes[2]) if d_sum_RC is not None and added else None
            )
            return d_sum_RC, d_sum_RC if ctx.residual else None, d_added_C, None, None, None
        sum_RC, weight_C, moments_2R = ctx.saved_tensors
        dx_RC, partial = backward(d_sum_RC, d_normed_RC, sum_RC, weight_C, moments_2R, added)
        # one launch writes all sums in the dtype of the parameters if they share one, as in our models
        shared = ctx.dtypes[0] if len(set(ctx.dtypes)) == 1 else torch.float32
        sums = column_sums(partial, shared).view(len(ctx.dtypes), -1).unbind()
        d_parameters = [total.to(dtype) for total, dtype in zip(sums, ctx.dtypes, strict=True)]
        d_added_C = d_parameters[2] if added else None
        return dx_RC, dx_RC if ctx.residual else None, d_added_C, d_parameters[0], d_parameters[1], None


def add_layer_norm(
    x_RC: Tensor,
    residual_RC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float,
    *,
    added_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`common.ops.add_layer_norm.reference.add_layer_norm_reference`."""
    result: tuple[Tensor, Tensor] = _AddLayerNorm.apply(x_RC, residual_RC, added_C, weight_C, bias_C, eps)
    return result
