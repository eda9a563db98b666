# mypy: allow-untyped-defs
"""Triton kernels of a residual addition and LayerNorm over R rows of C features.

If nothing is added, the input may be the transpose of a contiguous matrix, (C, R) in memory. It is read in this order,
and its gradient is written in the same order. The normalised rows are always contiguous.

Forward reads each input once and writes the sum and the normalised rows; it keeps mean and 1 / standard deviation of
each row. Backward reads the gradients of both results and the sum, and writes one gradient.

A program holds ``ROWS`` whole rows at a time; a thread has the same columns of all of them. Sums over rows have two
levels: backward runs as many programs as fit the GPU, each writes the sum of its rows, and
:mod:`common.ops.tiling` adds these partial sums in a fixed order.

Bytes at 131,072 rows of 320 and 16 bit: forward 336 MB, backward 336 MB.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.norm.rows import (
    load_fp32,
    load_moments,
    offset_of_rows,
    standardised,
    standardised_again,
    store_moments,
    through_norm,
)
from common.ops.tile import Tile
from common.ops.tiling import sums_by_dtype
from common.ops.triton_support import programs_for, require_contiguous


@triton.jit
def _offset_of_input(offset, row, R, TRANSPOSED: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the element offsets of rows in the input: ``offset``, or those in a matrix (C, R)."""
    if TRANSPOSED:
        offset = tl.arange(0, BLOCK_C).to(tl.int64)[None, :] * R + row[:, None]
    return offset


@triton.jit
def add_layer_norm_forward_kernel(
    x_ptr,  # (R, C), or (C, R) if TRANSPOSED
    residual_ptr,  # (R, C) if RESIDUAL
    added_ptr,  # (C,) if ADDED
    weight_ptr, bias_ptr,  # (C,)
    sum_ptr,  # (R, C), written if RESIDUAL or ADDED
    normed_ptr,  # (R, C)
    moments_ptr,  # (2, R) fp32: mean, 1 / standard deviation
    R, eps,
    C: tl.constexpr, RESIDUAL: tl.constexpr, ADDED: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the sum and the normalised rows. Grid (programs,); programs take groups of ROWS rows in turn."""
    column = tl.arange(0, BLOCK_C)
    inside = column < C
    weight = load_fp32(weight_ptr, column, inside)[None, :]
    bias = load_fp32(bias_ptr, column, inside)[None, :]
    if ADDED:
        added = load_fp32(added_ptr, column, inside)[None, :]
    for group in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        row = group * ROWS + tl.arange(0, ROWS)
        offset, mask = offset_of_rows(row, R, C, BLOCK_C)
        total = load_fp32(x_ptr, _offset_of_input(offset, row, R, TRANSPOSED, BLOCK_C), mask)
        if ADDED:
            total += added
        if RESIDUAL:
            total += load_fp32(residual_ptr, offset, mask)
        if RESIDUAL or ADDED:
            rounded = total.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + offset, rounded, mask=mask)
            total = rounded.to(tl.float32)
        normal, mean, rstd = standardised(total, eps, C, BLOCK_C)
        tl.store(normed_ptr + offset, (normal * weight + bias).to(normed_ptr.dtype.element_ty), mask=mask)
        store_moments(moments_ptr, mean, rstd, row, R)


@triton.jit
def add_layer_norm_backward_kernel(
    d_sum_ptr,  # (R, C) if READ: gradient of the sum from its other users; (C, R) if TRANSPOSED
    d_normed_ptr,  # (R, C)
    sum_ptr,  # (R, C); (C, R) if TRANSPOSED
    weight_ptr,  # (C,)
    moments_ptr,  # (2, R) fp32
    dx_ptr,  # (R, C); (C, R) if TRANSPOSED
    partial_ptr,  # (programs, 3 if ADDED else 2, C) fp32: partial gradients of weight, bias and the added vector
    R, READ: tl.constexpr,
    C: tl.constexpr, ADDED: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x and partial sums. Grid (programs,); programs take groups of ROWS rows in turn."""
    column = tl.arange(0, BLOCK_C)
    inside = column < C
    weight = load_fp32(weight_ptr, column, inside)[None, :]
    d_weight = tl.zeros((BLOCK_C,), tl.float32)
    d_bias = tl.zeros((BLOCK_C,), tl.float32)
    if ADDED:
        d_added = tl.zeros((BLOCK_C,), tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        row = group * ROWS + tl.arange(0, ROWS)
        offset, mask = offset_of_rows(row, R, C, BLOCK_C)
        input_offset = _offset_of_input(offset, row, R, TRANSPOSED, BLOCK_C)
        mean, rstd = load_moments(moments_ptr, row, R)
        normal = standardised_again(load_fp32(sum_ptr, input_offset, mask), mean, rstd, C, BLOCK_C)
        d_normed = load_fp32(d_normed_ptr, offset, mask)
        d_weight += tl.sum(d_normed * normal, 0)  # reduced in the loop: registers for one row, not for ROWS
        d_bias += tl.sum(d_normed, 0)
        dx = through_norm(d_normed * weight, normal, rstd, C)
        if READ:
            dx += load_fp32(d_sum_ptr, input_offset, mask)
        tl.store(dx_ptr + input_offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if ADDED:
            d_added += tl.sum(tl.where(mask, dx, 0.0), 0)
    KINDS: tl.constexpr = 3 if ADDED else 2
    target = partial_ptr + tl.program_id(0) * (KINDS * C) + column
    tl.store(target, d_weight, mask=inside)
    tl.store(target + C, d_bias, mask=inside)
    if ADDED:
        tl.store(target + 2 * C, d_added, mask=inside)


TILES: dict[str, Tile] = {
    "forward": Tile(elements=4096, warps=2, programs=0),
    "backward": Tile(elements=2048, warps=2, programs=8),
    "transposed forward": Tile(elements=4096, warps=8, programs=0),
    "transposed backward": Tile(elements=4096, warps=8, programs=4),
}
"""Tiles by pass. Here ``elements`` are those of the rows that a program holds at a time."""

_MOST_WARPS = 16


def _launch(name: str, x_RC: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the size arguments of a pass."""
    rows, features = x_RC.shape
    transposed = not x_RC.is_contiguous()
    tile = TILES[f"transposed {name}" if transposed else name]
    block = triton.next_power_of_2(features)
    held = max(1, tile.elements // block)
    warps = min(tile.warps * max(1, block // tile.elements), _MOST_WARPS)
    arguments = {"C": features, "TRANSPOSED": transposed, "ROWS": held, "BLOCK_C": block, "num_warps": warps}
    return (programs_for(triton.cdiv(rows, held), tile.programs, x_RC.device),), arguments


def forward(
    x_RC: Tensor, residual_RC: Tensor | None, added_C: Tensor | None, weight_C: Tensor, bias_C: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum, the normalised sum, and mean and 1 / standard deviation of each row, fp32 (2, R). One launch."""
    require_contiguous(added=added_C, weight=weight_C, bias=bias_C)
    nothing_added = residual_RC is None and added_C is None
    sum_RC = x_RC if nothing_added else torch.empty_like(x_RC)
    normed_RC = x_RC.new_empty(x_RC.shape)
    moments_2R = x_RC.new_empty((2, x_RC.shape[0]), dtype=torch.float32)
    grid, arguments = _launch("forward", x_RC)
    add_layer_norm_forward_kernel[grid](
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
    grid, arguments = _launch("backward", sum_RC)
    partial = moments_2R.new_empty((grid[0], (3 if added else 2) * sum_RC.shape[1]))
    add_layer_norm_backward_kernel[grid](
        d_sum_RC, d_normed_RC, sum_RC, weight_C, moments_2R, dx_RC, partial, sum_RC.shape[0],
        READ=d_sum_RC is not None, ADDED=added, **arguments,
    )  # fmt: skip
    return dx_RC, partial


def _is_transposed(x_RC: Tensor) -> bool:
    """Return whether a matrix is the transpose of a contiguous one, and not contiguous."""
    return not x_RC.is_contiguous() and x_RC.t().is_contiguous()


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RC: Tensor, residual_RC: Tensor | None, added_C: Tensor | None, weight_C: Tensor, bias_C: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not (_is_transposed(x_RC) and residual_RC is None and added_C is None):
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
        d_sum_RC, d_normed_RC = gradients
        added = len(ctx.dtypes) == 3
        if d_normed_RC is None:  # the normalised rows are not used
            d_added_C = (
                d_sum_RC.sum(0, dtype=torch.float32).to(ctx.dtypes[2]) if d_sum_RC is not None and added else None
            )
            return d_sum_RC, d_sum_RC if ctx.residual else None, d_added_C, None, None, None
        sum_RC, weight_C, moments_2R = ctx.saved_tensors
        if d_sum_RC is not None:
            d_sum_RC = d_sum_RC.contiguous() if sum_RC.is_contiguous() else d_sum_RC.t().contiguous().t()
        dx_RC, partial = backward(d_sum_RC, d_normed_RC.contiguous(), sum_RC, weight_C, moments_2R, added)
        d_weight_C, d_bias_C, *others = sums_by_dtype(partial, ctx.dtypes)
        return dx_RC, dx_RC if ctx.residual else None, others[0] if added else None, d_weight_C, d_bias_C, None


def add_layer_norm(
    x_RC: Tensor,
    residual_RC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float,
    *,
    added_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``x + residual + added`` and its LayerNorm, (R, C) each.

    See :func:`common.ops.add_layer_norm.add_layer_norm_reference`. The transpose of a contiguous matrix is not copied
    if nothing is added to it.
    """
    result: tuple[Tensor, Tensor] = _AddLayerNorm.apply(x_RC, residual_RC, added_C, weight_C, bias_C, eps)
    return result
