# mypy: allow-untyped-defs
"""Triton kernels of LayerNorm and modulation over R rows of E features, in N samples of L rows.

Forward reads x and writes y, in 16 bits or in FP8; it keeps mean and 1 / standard deviation of each row. Backward reads
the gradients of y and of the residual connection and x, and writes their sum: each program processes rows of a single
sample, so that it can add their terms of the gradients of scale and shift in registers. It writes one partial sum, and
:mod:`common.ops.tiling` adds these in a fixed order, without atomics. At the first use of an FP8 scale there is no
earlier maximum, so every program first computes a sample of the results.

Bytes at 8,192 rows of 3,072 in 16 bits: forward 101 MB, 23 us at the 4.3 TB/s of an H200; to FP8 76 MB, 18 us;
backward 201 MB and 13 MB of partial sums, 50 us.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.fp8_cast.device import finish, first_scale, no_peak, peak_of, round_to_fp8
from common.ops.fp8_cast.reference import E4M3, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Scaling
from common.ops.fp8_cast.triton import Output, fields_for_autograd, output
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
from common.ops.tiling import column_sums
from common.ops.triton_support import programs_for, require_contiguous


@triton.jit
def _modulated(given, row, R, L, epsilon, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return y of whole rows, 0 where no element exists, and their means and 1 / standard deviations."""
    x_ptr, scale_ptr, shift_ptr, scale_stride, shift_stride = given
    offset, mask = offset_of_rows(row, R, E, BLOCK_E)
    normal, mean, rstd = standardised(load_fp32(x_ptr, offset, mask), epsilon, E, BLOCK_E)
    column, sample = tl.arange(0, BLOCK_E)[None, :], (row // L)[:, None]
    scale = load_fp32(scale_ptr, sample * scale_stride + column, mask)
    return normal * (1.0 + scale) + load_fp32(shift_ptr, sample * shift_stride + column, mask), mean, rstd


@triton.jit
def modulated_norm_forward_kernel(
    given,  # x (R, E); scale and shift, (N, E) with the strides of their rows, which follow
    y_ptr,  # (R, E), or None
    y8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # (R, E) e4m3 and its scale, or None
    moments_ptr,  # (2, R) fp32
    R, L, epsilon,
    E: tl.constexpr, SAMPLED_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write y and the moments. Grid (programs,); programs take groups of ROWS rows in turn."""
    if y8_ptr is not None:
        known = tl.load(scale_ptr)
        scale = known
        peak = no_peak(ROWS, BLOCK_E, GROUP)
        if known == 0.0:
            sampled = no_peak(ROWS, BLOCK_E, GROUP)
            for first in range(0, SAMPLED_ROWS, ROWS):
                row = (first + tl.arange(0, ROWS)) * tl.cdiv(R, SAMPLED_ROWS)
                y, _, _ = _modulated(given, row, R, L, epsilon, E, BLOCK_E)
                sampled = peak_of(sampled, y, ROWS, BLOCK_E, GROUP)
            scale = first_scale(sampled, False)
    for group in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        row = group * ROWS + tl.arange(0, ROWS)
        y, mean, rstd = _modulated(given, row, R, L, epsilon, E, BLOCK_E)
        offset, mask = offset_of_rows(row, R, E, BLOCK_E)
        store_moments(moments_ptr, mean, rstd, row, R)
        if y_ptr is not None:
            tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
        if y8_ptr is not None:
            peak = peak_of(peak, y, ROWS, BLOCK_E, GROUP)
            tl.store(y8_ptr + offset, round_to_fp8(y, scale, False), mask=mask)
    if y8_ptr is not None:
        finish(peak, known, scale, scale_ptr, pending_ptr, scale_inverse_ptr, False, False)


@triton.jit
def modulated_norm_backward_kernel(
    dy_ptr,  # (R, E)
    d_residual_ptr,  # (R, E), or None: gradient of the returned x
    x_ptr,  # (R, E)
    scale_ptr, scale_stride,  # (N, E)
    moments_ptr,  # (2, R) fp32
    dx_ptr,  # (R, E)
    partial_ptr,  # (P, 2, N, E) fp32: partial gradients of scale and shift
    R, L,
    E: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x and partial sums. Grid (P, N); the programs of a sample take groups of rows in turn."""
    column, sample = tl.arange(0, BLOCK_E), tl.program_id(1)
    inside = column < E
    factor = 1.0 + load_fp32(scale_ptr + sample * scale_stride, column, inside)[None, :]
    d_scale = tl.zeros((ROWS, BLOCK_E), tl.float32)
    d_shift = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(L, ROWS), tl.num_programs(0)):
        token = group * ROWS + tl.arange(0, ROWS)
        row = tl.where(token < L, sample * L + token, R)
        offset, mask = offset_of_rows(row, R, E, BLOCK_E)
        dy = load_fp32(dy_ptr, offset, mask)
        mean, rstd = load_moments(moments_ptr, row, R)
        normal = standardised_again(load_fp32(x_ptr, offset, mask), mean, rstd, E, BLOCK_E)
        dx = through_norm(dy * factor, normal, rstd, E)
        if d_residual_ptr is not None:
            dx += load_fp32(d_residual_ptr, offset, mask)
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        d_scale += dy * normal
        d_shift += dy
    samples = tl.num_programs(1)
    target = partial_ptr + (tl.program_id(0) * 2 * samples + sample) * E + column
    tl.store(target, tl.sum(d_scale, 0), mask=inside)
    tl.store(target + samples * E, tl.sum(d_shift, 0), mask=inside)


TILES: dict[str, Tile] = {
    "forward": Tile(rows=1, warps=8, programs=0),
    "forward to fp8": Tile(rows=1, warps=8, programs=8),
    "backward": Tile(rows=1, warps=8, programs=2),
}
"""Tiles by pass. ``rows`` are those of a row of ``_ROW_OF_TILES`` features; programs hold more narrower rows."""

_ROW_OF_TILES = 4096


def _constants(tile: Tile, features: int) -> dict[str, int]:
    block = triton.next_power_of_2(features)
    return {
        "E": features,
        "ROWS": tile.rows * min(8, max(1, _ROW_OF_TILES // block)),
        "BLOCK_E": block,
        "num_warps": tile.warps,
    }


def forward(
    x_RE: Tensor, scale_NE: Tensor, shift_NE: Tensor, epsilon: float, fp8: Scaling | None
) -> tuple[Output, Tensor]:
    """Return y (R, E) in 16 bits or FP8, and mean and 1 / standard deviation of each row, fp32 (2, R). One launch."""
    rows, features = x_RE.shape
    tile = TILES["forward" if fp8 is None else "forward to fp8"]
    constants = _constants(tile, features)
    y = output(x_RE, features, E4M3, fp8, half=fp8 is None)
    moments_2R = x_RE.new_empty((2, rows), dtype=torch.float32)
    programs = programs_for(triton.cdiv(rows, constants["ROWS"]), tile.programs, x_RE.device)
    modulated_norm_forward_kernel[(programs,)](
        (x_RE, scale_NE, shift_NE, scale_NE.stride(0), shift_NE.stride(0)), y.half, *y.pointers(), moments_2R,
        rows, rows // len(scale_NE), epsilon,
        SAMPLED_ROWS=SAMPLED_ROWS_OF_COMPUTED, GROUP=min(8, constants["BLOCK_E"]), **constants,
    )  # fmt: skip
    return y, moments_2R


def backward(
    dy_RE: Tensor, d_residual_RE: Tensor | None, x_RE: Tensor, scale_NE: Tensor, moments_2R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (R, E), scale and shift (N, E), in the dtypes of x and scale. Two launches."""
    (rows, features), samples = x_RE.shape, len(scale_NE)
    constants = _constants(TILES["backward"], features)
    groups = triton.cdiv(rows // samples, constants["ROWS"])
    programs = programs_for(groups, TILES["backward"].programs, x_RE.device, samples)
    dx_RE = torch.empty_like(x_RE)
    partial = moments_2R.new_empty((programs, 2 * samples * features))
    modulated_norm_backward_kernel[(programs, samples)](
        dy_RE, d_residual_RE, x_RE, scale_NE, scale_NE.stride(0), moments_2R, dx_RE, partial, rows, rows // samples,
        **constants,
    )  # fmt: skip
    d_scale_NE, d_shift_NE = column_sums(partial, scale_NE.dtype).view(2, samples, features).unbind()
    return dx_RE, d_scale_NE, d_shift_NE


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RE: Tensor, scale_NE: Tensor, shift_NE: Tensor, epsilon: float, fp8: Scaling | None
    ) -> tuple[Tensor | None, ...]:
        y, moments_2R = forward(x_RE, scale_NE, shift_NE, epsilon, fp8)
        ctx.save_for_backward(x_RE, scale_NE, moments_2R)
        ctx.set_materialize_grads(False)
        y8 = y.fp8(x_RE.dtype)
        return x_RE.view_as(x_RE), *((y.half,) if y8 is None else fields_for_autograd(ctx, y8))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x_RE, scale_NE, moments_2R = ctx.saved_tensors
        d_residual_RE, dy_RE = gradients[0], gradients[-1]
        if dy_RE is None:  # y is not used
            return d_residual_RE, None, None, None, None
        d_residual_RE = None if d_residual_RE is None else d_residual_RE.contiguous()
        return *backward(dy_RE.contiguous(), d_residual_RE, x_RE, scale_NE, moments_2R), None, None


def modulated_norm(
    x_RE: Tensor, scale_NE: Tensor, shift_NE: Tensor, epsilon: float, *, fp8: Scaling | None = None
) -> tuple[Tensor, Tensor | Fp8Tensor]:
    """Return x and ``(1 + scale) LN(x) + shift``; see
    :func:`benchmarks.flux1.ops.modulated_norm.modulated_norm_reference`.

    Raises:
        ValueError: x is not contiguous, or rows of scale or shift are not.
    """
    require_contiguous(x=x_RE, scale=scale_NE[0], shift=shift_NE[0])
    residual_RE: Tensor
    residual_RE, *results = _ModulatedNorm.apply(x_RE, scale_NE, shift_NE, epsilon, fp8)
    return residual_RE, results[0] if fp8 is None else Fp8Tensor(*results)
