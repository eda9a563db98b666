# mypy: allow-untyped-defs, disable-error-code="assignment"
# (kernels append to tuples, which changes their type)
"""Triton kernels of a residual addition and a norm over T rows of E features.

``MEAN`` chooses LayerNorm with weights centred on zero and a bias; otherwise the norm is RMSNorm. A pointer is None if
its matrix is not needed.

In passes over whole rows, a program holds ``ROWS`` rows at a time and processes many groups of rows, so that it
updates the maximum for an FP8 scale with a single atomic. At the first use of a scale there is no earlier maximum, so
every program first computes a sample of the results.

Rows are held as a tuple of ``PARTS`` equal parts, of which every thread has the same columns. Triton's blocks are
powers of two, so one block for a row of 12,288 would waste a quarter of its registers and loads. Three parts of 4,096
waste nothing.

The sums over rows are a separate pass, whose programs own columns. In the backward pass, every program would hold
three sums of a whole row: 147 kB for 12,288 features, more than half of a multiprocessor's registers. The partial sums
of 132 programs would be 19 MB to write and to read. For comparison, a tensor of 1,024 rows (a rank's share with
sequence parallelism over 4) in 16 bits has 25 MB.

On an H200 at 4.3 TB/s in 16 bits, RMSNorm of 8,192 tokens of 8,192: forward reads residual and delta and writes the
sum and FP8, 470 MB, 109 us; backward reads dy, the sum and the residual's gradient and writes dx, also in FP8, 604 MB,
140 us; recomputing y 268 MB, 62 us; the weight gradient reads dy and the sum, 268 MB, 62 us. LayerNorm of 4,096 tokens
of 12,288: forward 352 MB, 82 us; backward 453 MB, 105 us; recomputing y 201 MB, 47 us; the parameter gradients read
dy, the sum and dx, 302 MB, 70 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.fp8_cast.device import finish, first_scale, no_peak, peak_of, round_to_fp8
from common.ops.fp8_cast.reference import SAMPLED_ROWS_OF_COMPUTED
from common.ops.norm.rows import load_fp32

SAMPLED_ROWS = tl.constexpr(SAMPLED_ROWS_OF_COMPUTED)


@triton.jit
def _offset(row, T, part, E: tl.constexpr, BLOCK: tl.constexpr):
    """Return the int64 element offsets of a part of rows, and a mask of the elements that exist."""
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = (row < T)[:, None] & (column < E)[None, :]
    return row.to(tl.int64)[:, None] * E + column[None, :], mask


@triton.jit
def _parameter(pointer, part, E: tl.constexpr, BLOCK: tl.constexpr):
    """Return a part of a parameter, fp32 (1, BLOCK); 0 beyond its end."""
    column = part * BLOCK + tl.arange(0, BLOCK)
    return load_fp32(pointer, column, column < E)[None, :]


@triton.jit
def _parameters(pointer, E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    parts = ()
    if pointer is not None:
        for part in tl.static_range(PARTS):
            parts += (_parameter(pointer, part, E, BLOCK),)
    return parts


@triton.jit
def _mean(parts, E: tl.constexpr, PARTS: tl.constexpr):
    """Return the means of whole rows, (rows, 1)."""
    total = parts[0]
    for part in tl.static_range(1, PARTS):
        total += parts[part]
    return tl.sum(total, 1)[:, None] / E


@triton.jit
def _moments(moments_ptr, row, T, MEAN: tl.constexpr):
    """Return means (0 for RMSNorm) and 1 / standard deviations of rows, (rows, 1) each."""
    mean = 0.0
    if MEAN:
        mean = tl.load(moments_ptr + row, mask=row < T, other=0.0)[:, None]
        moments_ptr += T
    return mean, tl.load(moments_ptr + row, mask=row < T, other=0.0)[:, None]


@triton.jit
def _factor(weight, MEAN: tl.constexpr):
    return 1.0 + weight if MEAN else weight


@triton.jit
def _normed(
    given, row, T, WRITE: tl.constexpr,
    MEAN: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return y in parts, rounded to the dtype of ``y_ptr``, 0 where no element exists.

    With WRITE, also store the sum and the moments.
    """
    residual_ptr, delta_ptr, sum_ptr, moments_ptr, y_ptr, weight, bias, added, epsilon = given
    xs, squares, ys, mean = (), (), (), 0.0
    for part in tl.static_range(PARTS):
        offset, mask = _offset(row, T, part, E, BLOCK)
        x = load_fp32(residual_ptr, offset, mask)
        if delta_ptr is not None:
            x += load_fp32(delta_ptr, offset, mask)
        if len(added) > 0:
            x += added[part]
        if sum_ptr is not None:
            x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
            if WRITE:
                tl.store(sum_ptr + offset, x.to(sum_ptr.dtype.element_ty), mask=mask)
        xs += (x,)
    if MEAN:
        mean = _mean(xs, E, PARTS)
    for part in tl.static_range(PARTS):
        centred = xs[part] - mean
        if MEAN and PARTS * BLOCK != E:
            centred = tl.where((part * BLOCK + tl.arange(0, BLOCK) < E)[None, :], centred, 0.0)
        squares += (centred * centred,)
    rstd = tl.where((row < T)[:, None], 1.0 / tl.sqrt(_mean(squares, E, PARTS) + epsilon), 0.0)
    if WRITE:
        if MEAN:
            tl.store(moments_ptr + row, tl.reshape(mean, (ROWS,)), mask=row < T)
            moments_ptr += T
        tl.store(moments_ptr + row, tl.reshape(rstd, (ROWS,)), mask=row < T)
    for part in tl.static_range(PARTS):
        offset, mask = _offset(row, T, part, E, BLOCK)
        y = (xs[part] - mean) * rstd * _factor(weight[part], MEAN)
        if MEAN:
            y = tl.where(mask, y + bias[part], 0.0)
        if y_ptr is not None:
            y = y.to(y_ptr.dtype.element_ty)
        ys += (y,)
    return ys


@triton.jit
def _gradient(
    given, row, T, WRITE: tl.constexpr,
    MEAN: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return dx in parts, 0 where no element exists."""
    dy_ptr, residual_ptr, moments_ptr, d_residual_ptr, weight = given
    mean, rstd = _moments(moments_ptr, row, T, MEAN)
    d_normals, normals, products, gradients, along_one = (), (), (), (), 0.0
    for part in tl.static_range(PARTS):
        offset, mask = _offset(row, T, part, E, BLOCK)
        normal = (load_fp32(residual_ptr, offset, mask) - mean) * rstd
        # 0 beyond the end of a row, because dy is 0 there
        d_normal = load_fp32(dy_ptr, offset, mask) * _factor(weight[part], MEAN)
        d_normals += (d_normal,)
        normals += (normal,)
        products += (d_normal * normal,)
    if MEAN:
        along_one = _mean(d_normals, E, PARTS)
    along = _mean(products, E, PARTS)
    for part in tl.static_range(PARTS):
        offset, mask = _offset(row, T, part, E, BLOCK)
        dx = (d_normals[part] - along_one - normals[part] * along) * rstd
        if d_residual_ptr is not None:
            dx += load_fp32(d_residual_ptr, offset, mask)
        gradients += (tl.where(mask, dx, 0.0) if MEAN else dx,)
    return gradients


@triton.jit
def _visit_rows(
    parts_of: tl.constexpr, given, x_ptr, x8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr, T, E5M2: tl.constexpr,
    FROZEN: tl.constexpr, MEAN: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the results of ``parts_of`` for every ``programs``-th group of ROWS rows, in 16 bits and in FP8."""
    GROUP: tl.constexpr = 8 if BLOCK > 8 else BLOCK
    if x8_ptr is not None:
        known = tl.load(scale_ptr)
        scale = known
        peak = no_peak(ROWS, BLOCK, GROUP)
        if known == 0.0:
            sampled = no_peak(ROWS, BLOCK, GROUP)
            step = tl.cdiv(T, SAMPLED_ROWS)
            for first in range(0, SAMPLED_ROWS, ROWS):
                row = (first + tl.arange(0, ROWS)) * step
                parts = parts_of(given, row, T, False, MEAN, E, PARTS, ROWS, BLOCK)
                for part in tl.static_range(PARTS):
                    sampled = peak_of(sampled, parts[part].to(tl.float32), ROWS, BLOCK, GROUP)
            scale = first_scale(sampled, E5M2)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        parts = parts_of(given, row, T, True, MEAN, E, PARTS, ROWS, BLOCK)
        for part in tl.static_range(PARTS):
            offset, mask = _offset(row, T, part, E, BLOCK)
            if x_ptr is not None:
                tl.store(x_ptr + offset, parts[part].to(x_ptr.dtype.element_ty), mask=mask)
            if x8_ptr is not None:
                x = parts[part].to(tl.float32)
                peak = peak_of(peak, x, ROWS, BLOCK, GROUP)
                tl.store(x8_ptr + offset, round_to_fp8(x, scale, E5M2), mask=mask)
    if x8_ptr is not None:
        finish(peak, known, scale, scale_ptr, pending_ptr, scale_inverse_ptr, E5M2, FROZEN)


@triton.jit
def row_norm_forward_kernel(
    residual_ptr,  # (T, E)
    delta_ptr,  # (T, E) or None
    added_ptr,  # (E,) or None
    weight_ptr, bias_ptr,  # (E,); the bias is None without MEAN
    sum_ptr,  # (T, E); None if nothing is added
    moments_ptr,  # (T,), with MEAN (2, T), fp32
    y_ptr,  # (T, E) or None
    y8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # (T, E) e4m3 and its scale, or None
    T, epsilon,
    FROZEN: tl.constexpr, MEAN: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store sum, moments and normalised rows of every ``programs``-th group of ROWS rows. Grid (programs,)."""
    weight, bias = _parameters(weight_ptr, E, PARTS, BLOCK), _parameters(bias_ptr, E, PARTS, BLOCK)
    added = _parameters(added_ptr, E, PARTS, BLOCK)
    given = residual_ptr, delta_ptr, sum_ptr, moments_ptr, y_ptr, weight, bias, added, epsilon
    _visit_rows(
        _normed, given, y_ptr, y8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr, T, False,
        FROZEN, MEAN, E, PARTS, ROWS, BLOCK, STAGES,
    )  # fmt: skip


@triton.jit
def row_norm_backward_kernel(
    dy_ptr,  # (T, E)
    residual_ptr,  # (T, E)
    moments_ptr,  # (T,), with MEAN (2, T), fp32
    weight_ptr,  # (E,)
    d_residual_ptr,  # (T, E) or None
    dx_ptr,  # (T, E)
    dx8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr,  # (T, E) e5m2 and its scale, or None
    T,
    FROZEN: tl.constexpr, MEAN: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the sum of every ``programs``-th group of ROWS rows. Grid (programs,)."""
    given = dy_ptr, residual_ptr, moments_ptr, d_residual_ptr, _parameters(weight_ptr, E, PARTS, BLOCK)
    _visit_rows(
        _gradient, given, dx_ptr, dx8_ptr, scale_ptr, pending_ptr, scale_inverse_ptr, T, True,
        FROZEN, MEAN, E, PARTS, ROWS, BLOCK, STAGES,
    )  # fmt: skip


@triton.jit
def row_norm_recompute_kernel(
    residual_ptr,  # (T, E)
    moments_ptr,  # (T,), with MEAN (2, T), fp32
    weight_ptr, bias_ptr,  # (E,); the bias is None without MEAN
    y_ptr,  # (T, E)
    T, MEAN: tl.constexpr,
    E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store one of PARTS parts of ROWS normalised rows, from sum and moments. Grid (ceil(T / ROWS) * PARTS,)."""
    part = tl.program_id(0) % PARTS
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    offset, mask = _offset(row, T, part, E, BLOCK)
    mean, rstd = _moments(moments_ptr, row, T, MEAN)
    weight = _factor(_parameter(weight_ptr, part, E, BLOCK), MEAN)
    y = (load_fp32(residual_ptr, offset, mask) - mean) * rstd * weight
    if MEAN:
        y += _parameter(bias_ptr, part, E, BLOCK)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_norm_parameter_gradients_kernel(
    dy_ptr,  # (T, E)
    residual_ptr,  # (T, E)
    moments_ptr,  # (T,), with MEAN (2, T), fp32
    dx_ptr,  # (T, E) or None
    partial_ptr,  # (P, KINDS, E) fp32: gradients of weight, of bias if MEAN, of added if dx_ptr is given
    T, KINDS: tl.constexpr, MEAN: tl.constexpr,
    E: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store partial gradients of the parameters for one part of the columns, summed over every P-th group of ROWS rows.

    Grid (PARTS, P).
    """
    part = tl.program_id(0)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    if MEAN:
        d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    if dx_ptr is not None:
        d_added = tl.zeros((ROWS, BLOCK), tl.float32)
    for group in range(tl.program_id(1), tl.cdiv(T, ROWS), tl.num_programs(1)):
        row = group * ROWS + tl.arange(0, ROWS)
        offset, mask = _offset(row, T, part, E, BLOCK)
        mean, rstd = _moments(moments_ptr, row, T, MEAN)
        dy = load_fp32(dy_ptr, offset, mask)
        d_weight += dy * ((load_fp32(residual_ptr, offset, mask) - mean) * rstd)
        if MEAN:
            d_bias += dy
        if dx_ptr is not None:
            d_added += load_fp32(dx_ptr, offset, mask)
    column = part * BLOCK + tl.arange(0, BLOCK)
    target = partial_ptr + tl.program_id(1) * (KINDS * E) + column
    tl.store(target, tl.sum(d_weight, 0), mask=column < E)
    if MEAN:
        tl.store(target + E, tl.sum(d_bias, 0), mask=column < E)
    if dx_ptr is not None:
        tl.store(target + (KINDS - 1) * E, tl.sum(d_added, 0), mask=column < E)
