# mypy: allow-untyped-defs
"""Triton kernels of ``LayerNorm(residual + dropout(x + bias))`` over T rows of E features.

Forward reads x and the residual once and writes y; backward reads dy, x and the residual once and writes two gradients.
For backward nothing but mean and 1 / standard deviation of each row is stored: the sum that was normalised is computed
again, in fp32, from the tensors that went into it, with the same mask. Storing the sum instead would move as many bytes
(one tensor written forward, one read less backward), take as much memory, and round it.

A program works on ``ROWS`` whole rows at a time, so that one exchange between its warps serves all of them. Sums over
tokens are two-level: backward runs as many programs as the GPU holds, each adds up the rows it visits and writes one
partial sum; :mod:`common.ops.tiling.column_sums` adds those in a fixed order.

A result with two readers has two gradients, which backward adds in registers: one read more, where a pass of its own
would read both and write their sum.

In FP8 forward writes the result once more, backward the gradient of x in the place of the 16-bit one. Their transposes
are left to another kernel, which reads a byte: whole rows have no tiles that a store of columns could be made of. The
first use of a scale has no maximum of a use before: every program then computes a sample of the results first.

On an H200 at 24,576 tokens, E = 1024, 16 bit: forward 151 MB, 35 us at 4.3 TB/s; backward 252 MB, 59 us, with two
gradients 302 MB, 70 us. To FP8 forward 176 MB, 41 us; backward with two gradients 277 MB, 64 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.dropout.kernels import keep_of_rows, mask_keys
from common.ops.fp8_cast.device import begin, block_of_columns, finish_result, store_result
from common.ops.norm.rows import (
    load_moments,
    load_wide,
    place_of_rows,
    standardised,
    standardised_again,
    store_moments,
    through_norm,
)


@triton.jit
def _keep(row, E: tl.constexpr, BLOCK_E: tl.constexpr, first, second, THRESHOLD: tl.constexpr):
    """Which elements of whole rows the dropout keeps."""
    return keep_of_rows((row * E).to(tl.uint32), BLOCK_E, E % 2 == 0, first, second, THRESHOLD)


@triton.jit
def _keys(seed_ptr, site, THRESHOLD: tl.constexpr):
    """Of the mask; not read without one."""
    if THRESHOLD:
        return mask_keys(seed_ptr, site)
    else:
        return 0, 0


@triton.jit
def _normalised(given, columns, inverse, row, T, E: tl.constexpr):
    """y of whole rows, zero where there is none, rounded to the dtype of x; their means and 1 / deviations."""
    x_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr, first, second, epsilon = given[0]
    THRESHOLD: tl.constexpr = given[1]
    BLOCK_E: tl.constexpr = columns[0].shape[0]
    column = tl.arange(0, BLOCK_E)
    inside = column < E
    place, mask = place_of_rows(row, T, E, BLOCK_E)
    total = load_wide(x_ptr, place, mask)
    if bias_ptr is not None:
        total += load_wide(bias_ptr, column, inside)[None, :]
    if THRESHOLD:
        keep = _keep(row, E, BLOCK_E, first, second, THRESHOLD)
        total = tl.where(keep, total * given[2], 0.0)
    if residual_ptr is not None:
        total += load_wide(residual_ptr, place, mask)
    normal, mean, rstd = standardised(total, epsilon, E, BLOCK_E)
    y = normal * load_wide(weight_ptr, column, inside)[None, :]
    y += load_wide(norm_bias_ptr, column, inside)[None, :]
    y = tl.where(mask, y, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
    return ((y, 0),), (mean, rstd)


@triton.jit
def _gradients(given, columns, inverse, row, T, E: tl.constexpr):
    """Of whole rows: the gradients of x and of the residual; dy, and what the norm made of x before its weight."""
    dy_ptr, other_dy_ptr, x_ptr, bias_ptr, bias, residual_ptr, weight, first, second, moments_ptr = given[0]
    THRESHOLD: tl.constexpr = given[1]
    BLOCK_E: tl.constexpr = columns[0].shape[0]
    place, mask = place_of_rows(row, T, E, BLOCK_E)
    dy = load_wide(dy_ptr, place, mask)
    if other_dy_ptr is not None:
        dy += load_wide(other_dy_ptr, place, mask)
    total = load_wide(x_ptr, place, mask)
    if bias_ptr is not None:
        total += bias
    mean, rstd = load_moments(moments_ptr, row, T)
    if THRESHOLD:
        keep = _keep(row, E, BLOCK_E, first, second, THRESHOLD)
        total = tl.where(keep, total * given[2], 0.0)
    if residual_ptr is not None:
        total += load_wide(residual_ptr, place, mask)
    normal = standardised_again(total, mean, rstd, E, BLOCK_E)
    d_total = through_norm(dy * weight, normal, rstd, E)
    dx = d_total
    if THRESHOLD:
        dx = tl.where(keep, d_total * given[2], 0.0)
    return ((dx, 0),), ((d_total, 0),), dy, normal


@triton.jit(do_not_specialize=["site"])
def dropout_add_norm_forward_kernel(
    x_ptr,  # (T, E)
    bias_ptr,  # (E,) or None
    residual_ptr,  # (T, E) or None
    weight_ptr, norm_bias_ptr,  # (E,)
    seed_ptr,  # 0-d int64
    output,  # y (T, E), and rounded y in e4m3
    moments_ptr,  # (2, T) fp32: mean, 1 / standard deviation
    T, site, epsilon,
    E: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr, SAMPLED_ROWS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); every program visits each programs-th group of ROWS rows."""
    first, second = _keys(seed_ptr, site, THRESHOLD)
    tensors = (x_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr, first, second, epsilon)
    columns = block_of_columns(None, 0, E, BLOCK_E)
    known, scale, peak = begin(
        output, 0, (tensors, THRESHOLD, INVERSE_KEEP), None, T, E, 1, block_of_columns, _normalised,
        SAMPLED_ROWS, ROWS, BLOCK_E, GROUP,
    )  # fmt: skip
    own = tl.program_id(0)
    end = own + 1 if ONE_TILE else tl.cdiv(T, ROWS)
    for group in range(own, end, tl.num_programs(0)):
        row = tl.full((), ROWS, tl.int64) * group + tl.arange(0, ROWS)
        parts, moments = _normalised((tensors, THRESHOLD, INVERSE_KEEP), columns, None, row, T, E)
        store_moments(moments_ptr, moments[0], moments[1], row, T)
        peak = store_result(output, scale, peak, parts, columns, row, T, GROUP)
    finish_result(output, known, scale, peak)


@triton.jit(do_not_specialize=["site"])
def dropout_add_norm_backward_kernel(
    dy_ptr,  # (T, E)
    other_dy_ptr,  # (T, E) or None: added to it
    x_ptr,  # (T, E)
    bias_ptr,  # (E,) or None
    residual_ptr,  # (T, E) or None
    weight_ptr,  # (E,)
    seed_ptr,  # 0-d int64
    moments_ptr,  # (2, T) fp32
    output,  # dx (T, E), in e5m2 or not
    residual_output,  # the gradient of the residual (T, E)
    partial_ptr,  # (programs, 2 or with a bias 3, E) fp32: sums for weight, norm's bias and bias
    T, site,
    E: tl.constexpr, THRESHOLD: tl.constexpr, INVERSE_KEEP: tl.constexpr, SAMPLED_ROWS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); every program visits each programs-th group of ROWS rows."""
    column = tl.arange(0, BLOCK_E)
    inside = column < E
    weight = load_wide(weight_ptr, column, inside)[None, :]
    bias = 0.0
    if bias_ptr is not None:
        bias = load_wide(bias_ptr, column, inside)[None, :]
    first, second = _keys(seed_ptr, site, THRESHOLD)
    d_weight = tl.zeros((BLOCK_E,), tl.float32)
    d_norm_bias = tl.zeros((BLOCK_E,), tl.float32)
    d_bias = tl.zeros((BLOCK_E,), tl.float32)
    tensors = (dy_ptr, other_dy_ptr, x_ptr, bias_ptr, bias, residual_ptr, weight, first, second, moments_ptr)
    columns = block_of_columns(None, 0, E, BLOCK_E)
    known, scale, peak = begin(
        output, 0, (tensors, THRESHOLD, INVERSE_KEEP), None, T, E, 1, block_of_columns, _gradients,
        SAMPLED_ROWS, ROWS, BLOCK_E, GROUP,
    )  # fmt: skip
    for group in range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0)):
        row = tl.full((), ROWS, tl.int64) * group + tl.arange(0, ROWS)
        parts, residual_parts, dy, normal = _gradients((tensors, THRESHOLD, INVERSE_KEEP), columns, None, row, T, E)
        d_weight += tl.sum(dy * normal, 0)
        d_norm_bias += tl.sum(dy, 0)
        if bias_ptr is not None:
            d_bias += tl.sum(parts[0][0], 0)
        store_result(residual_output, scale, peak, residual_parts, columns, row, T, GROUP)
        peak = store_result(output, scale, peak, parts, columns, row, T, GROUP)
    KINDS: tl.constexpr = 2 if bias_ptr is None else 3
    target = partial_ptr + tl.program_id(0) * (KINDS * E) + column
    tl.store(target, d_weight, mask=inside)
    tl.store(target + E, d_norm_bias, mask=inside)
    if bias_ptr is not None:
        tl.store(target + 2 * E, d_bias, mask=inside)
    finish_result(output, known, scale, peak)
