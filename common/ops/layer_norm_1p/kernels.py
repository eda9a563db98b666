# mypy: allow-untyped-defs, disable-error-code="assignment"
# (a tuple grows within a kernel)
"""Triton kernels of a residual addition and LayerNorm, weights centred on zero, over T rows of E features.

As in :mod:`common.ops.rms_norm.kernels` a program of a pass that looks at whole rows visits many groups of them, the
maximum for a scale in FP8 is one atomic of a program, and at the first use of a scale every program computes a sample
of the results first. Rows are held in parts (:mod:`common.ops.norm.parted_rows`); parameters are loaded for each row
anew, out of the caches, since registers that held them would be missing for rows.

The sums over rows are a pass of their own, of programs that own columns. In the backward pass itself every program
would hold three sums of a whole row, 147 kB of 12,288 features, more than half of a multiprocessor's registers, and the
partial sums of 132 programs would be 19 MB to write and to read, where 1,024 rows (what a rank has with sequence
parallelism over 4) have 25 MB in a tensor of 16 bits.

On an H200 at 4,096 tokens, E = 12,288, 16 bit: forward reads residual and delta and writes the sum and FP8, 352 MB,
82 us at 4.3 TB/s; backward reads dy, the sum and the residual's gradient and writes dx, in FP8 too, 453 MB, 105 us; y
once more 201 MB, 47 us; the parameters' gradients read dy, the sum and dx, 302 MB, 70 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.fp8_cast.device import finish, first_scale, no_peak, peak_of, round_to_fp8
from common.ops.norm.parted_rows import load_parameter, moments_of_parts, place_of_part, sum_of_parts
from common.ops.norm.rows import load_moments, load_wide, store_moments


@triton.jit
def _sums(
    residual_ptr, delta_ptr, added, row, T,
    E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    DELTA: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The residual, with what is added to it rounded to its dtype, in parts."""
    parts = ()
    for part in tl.static_range(PARTS):
        place, mask = place_of_part(row, T, part, E, PARTS, BLOCK, EVEN)
        x = load_wide(residual_ptr, place, mask)
        if DELTA:
            x += load_wide(delta_ptr, place, mask)
        if ADDED:
            x += added[part]
        if DELTA or ADDED:
            x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
        parts += (x,)
    return parts


@triton.jit
def _scaled(x, mean, rstd, weight, bias):
    return (x - mean) * rstd * (1.0 + weight) + bias


@triton.jit
def _through(
    dy_ptr, residual_ptr, moments_ptr, weight, row, T,
    E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Gradient of the normalised rows and those themselves in parts, the means of the first and of both's product over
    rows, and 1 / the standard deviation."""
    mean, rstd = load_moments(moments_ptr, row, T)
    d_normals, normals, products = (), (), ()
    for part in tl.static_range(PARTS):
        place, mask = place_of_part(row, T, part, E, PARTS, BLOCK, EVEN)
        # 0 behind the end of a row through its dy
        d_normal = load_wide(dy_ptr, place, mask) * (1.0 + weight[part])
        normal = (load_wide(residual_ptr, place, mask) - mean) * rstd
        d_normals += (d_normal,)
        normals += (normal,)
        products += (d_normal * normal,)
    return d_normals, normals, sum_of_parts(d_normals, PARTS) / E, sum_of_parts(products, PARTS) / E, rstd


@triton.jit
def _gradient(
    d_normal, normal, along_one, along, rstd, d_residual_ptr, row, T, part: tl.constexpr,
    E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """dx of a part; 0 of what doesn't exist."""
    place, mask = place_of_part(row, T, part, E, PARTS, BLOCK, EVEN)
    dx = (d_normal - along_one - normal * along) * rstd
    if RESIDUAL:
        dx += load_wide(d_residual_ptr, place, mask)
    return tl.where(mask, dx, 0.0), place, mask


@triton.jit
def layer_norm_1p_forward_kernel(
    residual_ptr,  # (T, E)
    delta_ptr,  # (T, E) if DELTA
    added_ptr,  # (E,) if ADDED
    weight_ptr, bias_ptr,  # (E,)
    sum_ptr,  # (T, E), written if DELTA or ADDED
    moments_ptr,  # (2, T) fp32
    y_ptr,  # (T, E), written if HALF
    y8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # (T, E) e4m3 and its scale, if FP8
    T, epsilon,
    DELTA: tl.constexpr, ADDED: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr, FROZEN: tl.constexpr,
    SAMPLED_ROWS: tl.constexpr, GROUP: tl.constexpr,
    E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); every program visits each programs-th group of ROWS rows."""
    weight = load_parameter(weight_ptr, E, PARTS, BLOCK)
    bias = load_parameter(bias_ptr, E, PARTS, BLOCK)
    added = ()
    if ADDED:
        added = load_parameter(added_ptr, E, PARTS, BLOCK)
    if FP8:
        known = tl.load(scale_ptr)
        scale = known
        peak = no_peak(ROWS, BLOCK, GROUP)
        if known == 0.0:
            sampled = no_peak(ROWS, BLOCK, GROUP)
            step = tl.cdiv(T, SAMPLED_ROWS)
            for first in range(0, SAMPLED_ROWS, ROWS):
                row = (first + tl.arange(0, ROWS)) * step
                parts = _sums(residual_ptr, delta_ptr, added, row, T, E, PARTS, BLOCK, False, DELTA, ADDED)
                mean, rstd = moments_of_parts(parts, epsilon, E, PARTS, BLOCK)
                for part in tl.static_range(PARTS):
                    place, mask = place_of_part(row, T, part, E, PARTS, BLOCK, False)
                    y = tl.where(mask, _scaled(parts[part], mean, rstd, weight[part], bias[part]), 0.0)
                    if HALF:
                        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
                    sampled = peak_of(sampled, y, ROWS, BLOCK, GROUP)
            scale = first_scale(sampled, False)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        parts = _sums(residual_ptr, delta_ptr, added, row, T, E, PARTS, BLOCK, EVEN, DELTA, ADDED)
        mean, rstd = moments_of_parts(parts, epsilon, E, PARTS, BLOCK)
        store_moments(moments_ptr, tl.reshape(mean, (ROWS,)), tl.reshape(rstd, (ROWS,)), row, T)
        for part in tl.static_range(PARTS):
            place, mask = place_of_part(row, T, part, E, PARTS, BLOCK, EVEN)
            if DELTA or ADDED:
                tl.store(sum_ptr + place, parts[part].to(sum_ptr.dtype.element_ty), mask=mask)
            y = tl.where(mask, _scaled(parts[part], mean, rstd, weight[part], bias[part]), 0.0)
            if HALF:
                rounded = y.to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + place, rounded, mask=mask)
                y = rounded.to(tl.float32)
            if FP8:
                peak = peak_of(peak, y, ROWS, BLOCK, GROUP)
                tl.store(y8_ptr + place, round_to_fp8(y, scale, False), mask=mask)
    if FP8:
        finish(peak, known, scale, scale_ptr, pending_ptr, scale_inverse_ptr, False, FROZEN)


@triton.jit
def layer_norm_1p_backward_kernel(
    dy_ptr,  # (T, E)
    residual_ptr,  # (T, E)
    moments_ptr,  # (2, T) fp32
    weight_ptr,  # (E,)
    d_residual_ptr,  # (T, E) if RESIDUAL
    dx_ptr,  # (T, E)
    dx8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # (T, E) e5m2 and its scale, if FP8
    T,
    RESIDUAL: tl.constexpr, FP8: tl.constexpr, FROZEN: tl.constexpr, SAMPLED_ROWS: tl.constexpr, GROUP: tl.constexpr,
    E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); every program visits each programs-th group of ROWS rows."""
    weight = load_parameter(weight_ptr, E, PARTS, BLOCK)
    if FP8:
        known = tl.load(scale_ptr)
        scale = known
        peak = no_peak(ROWS, BLOCK, GROUP)
        if known == 0.0:
            sampled = no_peak(ROWS, BLOCK, GROUP)
            step = tl.cdiv(T, SAMPLED_ROWS)
            for first in range(0, SAMPLED_ROWS, ROWS):
                row = (first + tl.arange(0, ROWS)) * step
                d_normals, normals, along_one, along, rstd = _through(
                    dy_ptr, residual_ptr, moments_ptr, weight, row, T, E, PARTS, BLOCK, False
                )
                for part in tl.static_range(PARTS):
                    dx, place, mask = _gradient(
                        d_normals[part], normals[part], along_one, along, rstd, d_residual_ptr, row, T, part,
                        E, PARTS, BLOCK, False, RESIDUAL,
                    )  # fmt: skip
                    sampled = peak_of(sampled, dx, ROWS, BLOCK, GROUP)
            scale = first_scale(sampled, True)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        d_normals, normals, along_one, along, rstd = _through(
            dy_ptr, residual_ptr, moments_ptr, weight, row, T, E, PARTS, BLOCK, EVEN
        )
        for part in tl.static_range(PARTS):
            dx, place, mask = _gradient(
                d_normals[part], normals[part], along_one, along, rstd, d_residual_ptr, row, T, part,
                E, PARTS, BLOCK, EVEN, RESIDUAL,
            )  # fmt: skip
            tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if FP8:
                peak = peak_of(peak, dx, ROWS, BLOCK, GROUP)
                tl.store(dx8_ptr + place, round_to_fp8(dx, scale, True), mask=mask)
    if FP8:
        finish(peak, known, scale, scale_ptr, pending_ptr, scale_inverse_ptr, True, FROZEN)


@triton.jit
def layer_norm_1p_recompute_kernel(
    residual_ptr,  # (T, E)
    moments_ptr,  # (2, T) fp32
    weight_ptr, bias_ptr,  # (E,)
    y_ptr,  # (T, E)
    T, E,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (T / ROWS * E / BLOCK_E,)."""
    blocks = tl.cdiv(E, BLOCK_E)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = column < E
    mask = (row < T)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * E + column[None, :]
    mean, rstd = load_moments(moments_ptr, row, T)
    weight, bias = load_wide(weight_ptr, column, inside)[None, :], load_wide(bias_ptr, column, inside)[None, :]
    y = _scaled(load_wide(residual_ptr, place, mask), mean, rstd, weight, bias)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_1p_parameter_gradients_kernel(
    dy_ptr,  # (T, E)
    residual_ptr,  # (T, E)
    moments_ptr,  # (2, T) fp32
    dx_ptr,  # (T, E) if ADDED
    partial_ptr,  # (P, 2 or with ADDED 3, E) fp32: sums for weight, bias and what was added
    T, E,
    ADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (E / BLOCK_E, P); every program adds up some columns of each P-th group of ROWS rows."""
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = column < E
    d_weight = tl.zeros((ROWS, BLOCK_E), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK_E), tl.float32)
    if ADDED:
        d_added = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for group in range(tl.program_id(1), tl.cdiv(T, ROWS), tl.num_programs(1)):
        row = group * ROWS + tl.arange(0, ROWS)
        mask = (row < T)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * E + column[None, :]
        mean, rstd = load_moments(moments_ptr, row, T)
        dy = load_wide(dy_ptr, place, mask)
        d_weight += dy * ((load_wide(residual_ptr, place, mask) - mean) * rstd)
        d_bias += dy
        if ADDED:
            d_added += load_wide(dx_ptr, place, mask)
    KINDS: tl.constexpr = 3 if ADDED else 2
    target = partial_ptr + tl.program_id(1) * (KINDS * E) + column
    tl.store(target, tl.sum(d_weight, 0), mask=inside)
    tl.store(target + E, tl.sum(d_bias, 0), mask=inside)
    if ADDED:
        tl.store(target + 2 * E, tl.sum(d_added, 0), mask=inside)
