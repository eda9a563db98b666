# mypy: allow-untyped-defs
"""Triton kernels of a residual addition and RMSNorm over T rows of E features.

A program holds ``ROWS`` whole rows at a time and visits many groups of them, so that the maximum for a scale in FP8 is
one atomic of a program. The first use of a scale has no maximum of a use before: every program then computes a sample
of the results first.

On an H200 at 8,192 tokens, E = 8192, 16 bit: forward reads residual and delta and writes the sum and FP8, 470 MB,
109 us at 4.3 TB/s; backward reads dy, the sum and the residual's gradient and writes dx, in FP8 too, 604 MB, 140 us;
y once more 268 MB, 62 us; the weight's gradient reads dy and the sum, 268 MB, 62 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.fp8_cast.device import finish, first_scale, no_peak, peak_of, round_to_fp8


@triton.jit
def _load(pointer, place, mask):
    return tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _place(row, T, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Place and mask of whole rows."""
    column = tl.arange(0, BLOCK_E)
    return row.to(tl.int64)[:, None] * E + column[None, :], (row < T)[:, None] & (column < E)[None, :]


@triton.jit
def _weight(weight_ptr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    column = tl.arange(0, BLOCK_E)
    return _load(weight_ptr, column, column < E)[None, :]


@triton.jit
def _sum(residual_ptr, delta_ptr, place, mask, DELTA: tl.constexpr):
    """The residual, with what is added to it rounded to its dtype."""
    x = _load(residual_ptr, place, mask)
    if DELTA:
        x = (x + _load(delta_ptr, place, mask)).to(residual_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _inverse_rms(x, row, T, epsilon, E: tl.constexpr):
    """0 of rows that don't exist, whose y would otherwise be no number without an epsilon."""
    return tl.where(row < T, 1.0 / tl.sqrt(tl.sum(x * x, 1) / E + epsilon), 0.0)


@triton.jit
def _gradient(
    dy_ptr, residual_ptr, inverse_rms_ptr, d_residual_ptr, weight, row, place, mask, T,
    E: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < T, other=0.0)[:, None]
    normal = _load(residual_ptr, place, mask) * inverse_rms
    d_normal = _load(dy_ptr, place, mask) * weight
    along = tl.sum(d_normal * normal, 1)[:, None] / E
    dx = (d_normal - normal * along) * inverse_rms
    if RESIDUAL:
        dx += _load(d_residual_ptr, place, mask)
    return dx


@triton.jit
def rms_norm_forward_kernel(
    residual_ptr,  # (T, E)
    delta_ptr,  # (T, E) if DELTA
    weight_ptr,  # (E,)
    sum_ptr,  # (T, E), written if DELTA
    inverse_rms_ptr,  # (T,) fp32
    y_ptr,  # (T, E), written if HALF
    y8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # (T, E) e4m3 and its scale, if FP8
    T, epsilon,
    E: tl.constexpr, DELTA: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr, FROZEN: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); every program visits each programs-th group of ROWS rows."""
    weight = _weight(weight_ptr, E, BLOCK_E)
    if FP8:
        known = tl.load(scale_ptr)
        scale = known
        peak = no_peak(ROWS, BLOCK_E, GROUP)
        if known == 0.0:
            sampled = no_peak(ROWS, BLOCK_E, GROUP)
            step = tl.cdiv(T, SAMPLED_ROWS)
            for first in range(0, SAMPLED_ROWS, ROWS):
                row = (first + tl.arange(0, ROWS)) * step
                place, mask = _place(row, T, E, BLOCK_E)
                x = _sum(residual_ptr, delta_ptr, place, mask, DELTA)
                y = x * _inverse_rms(x, row, T, epsilon, E)[:, None] * weight
                if HALF:
                    y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
                sampled = peak_of(sampled, y, ROWS, BLOCK_E, GROUP)
            scale = first_scale(sampled, False)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        place, mask = _place(row, T, E, BLOCK_E)
        x = _sum(residual_ptr, delta_ptr, place, mask, DELTA)
        if DELTA:
            tl.store(sum_ptr + place, x.to(sum_ptr.dtype.element_ty), mask=mask)
        inverse_rms = _inverse_rms(x, row, T, epsilon, E)
        tl.store(inverse_rms_ptr + row, inverse_rms, mask=row < T)
        y = x * inverse_rms[:, None] * weight
        if HALF:
            rounded = y.to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + place, rounded, mask=mask)
            y = rounded.to(tl.float32)
        if FP8:
            peak = peak_of(peak, y, ROWS, BLOCK_E, GROUP)
            tl.store(y8_ptr + place, round_to_fp8(y, scale, False), mask=mask)
    if FP8:
        finish(peak, known, scale, scale_ptr, pending_ptr, scale_inverse_ptr, False, FROZEN)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr,  # (T, E)
    residual_ptr,  # (T, E)
    inverse_rms_ptr,  # (T,) fp32
    weight_ptr,  # (E,)
    d_residual_ptr,  # (T, E) if RESIDUAL
    dx_ptr,  # (T, E)
    dx8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # (T, E) e5m2 and its scale, if FP8
    T,
    E: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr, FROZEN: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); every program visits each programs-th group of ROWS rows."""
    weight = _weight(weight_ptr, E, BLOCK_E)
    if FP8:
        known = tl.load(scale_ptr)
        scale = known
        peak = no_peak(ROWS, BLOCK_E, GROUP)
        if known == 0.0:
            sampled = no_peak(ROWS, BLOCK_E, GROUP)
            step = tl.cdiv(T, SAMPLED_ROWS)
            for first in range(0, SAMPLED_ROWS, ROWS):
                row = (first + tl.arange(0, ROWS)) * step
                place, mask = _place(row, T, E, BLOCK_E)
                dx = _gradient(
                    dy_ptr, residual_ptr, inverse_rms_ptr, d_residual_ptr, weight, row, place, mask, T, E, RESIDUAL
                )
                sampled = peak_of(sampled, dx, ROWS, BLOCK_E, GROUP)
            scale = first_scale(sampled, True)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        place, mask = _place(row, T, E, BLOCK_E)
        dx = _gradient(dy_ptr, residual_ptr, inverse_rms_ptr, d_residual_ptr, weight, row, place, mask, T, E, RESIDUAL)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if FP8:
            peak = peak_of(peak, dx, ROWS, BLOCK_E, GROUP)
            tl.store(dx8_ptr + place, round_to_fp8(dx, scale, True), mask=mask)
    if FP8:
        finish(peak, known, scale, scale_ptr, pending_ptr, scale_inverse_ptr, True, FROZEN)


@triton.jit
def rms_norm_recompute_kernel(
    residual_ptr,  # (T, E)
    inverse_rms_ptr,  # (T,) fp32
    weight_ptr,  # (E,)
    y_ptr,  # (T, E)
    T, E,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (T / ROWS * E / BLOCK_E,)."""
    blocks = tl.cdiv(E, BLOCK_E)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = (row < T)[:, None] & (column < E)[None, :]
    place = row.to(tl.int64)[:, None] * E + column[None, :]
    inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < T, other=0.0)[:, None]
    y = _load(residual_ptr, place, mask) * inverse_rms * _load(weight_ptr, column, column < E)[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_weight_gradient_kernel(
    dy_ptr,  # (T, E)
    residual_ptr,  # (T, E)
    inverse_rms_ptr,  # (T,) fp32
    partial_ptr,  # (P, E) fp32
    T, E,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (E / BLOCK_E, P); every program adds up some columns of each P-th group of ROWS rows."""
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for group in range(tl.program_id(1), tl.cdiv(T, ROWS), tl.num_programs(1)):
        row = group * ROWS + tl.arange(0, ROWS)
        mask = (row < T)[:, None] & (column < E)[None, :]
        place = row.to(tl.int64)[:, None] * E + column[None, :]
        inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < T, other=0.0)[:, None]
        total += _load(dy_ptr, place, mask) * _load(residual_ptr, place, mask) * inverse_rms
    tl.store(partial_ptr + tl.program_id(1) * E + column, tl.sum(total, 0), mask=column < E)
