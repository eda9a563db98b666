# mypy: allow-untyped-defs
"""Triton kernels of batch norm on channels-last activations, viewed as a matrix of M = N * H * W rows and C columns.

Forward reads x once for the moments and once to normalise it. Backward reads the gradient and x once for the two sums
of the batch norm gradient, and again to write the gradient of x. Memory bounds every pass. A program owns ``BLOCK_C``
columns and loops over tiles of ``BLOCK_M`` rows; at any time all programs work on neighbouring tiles. The second pass
runs in the opposite direction (``REVERSE``) and so finds the end of the first pass in the L2 cache.

Sums have two levels: each program adds x minus a pivot (row 0) in fp32 and writes one partial sum per column; a small
kernel adds the partial sums in a fixed order, so results are the same in every run.

``statistics`` is a (5, C) fp32 matrix: scale and shift of the affine map x * scale + shift, mean, 1 / standard
deviation, 1 / number of elements. ``coefficients`` is (3, C): a, b and c of dx = a * dz + b * x + c.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.tiling import load_tile, store_tile


@triton.jit
def _columns(C, BLOCK_C: tl.constexpr):
    """Return the columns of this program and a mask of the valid ones."""
    column = tl.program_id(0) % tl.cdiv(C, BLOCK_C) * BLOCK_C + tl.arange(0, BLOCK_C)
    return column, column < C


@triton.jit
def _first_and_step(C, BLOCK_C: tl.constexpr):
    """Return the first tile of this program, and the step to its next: the number of programs with its columns."""
    blocks = tl.cdiv(C, BLOCK_C)
    return tl.program_id(0) // blocks, tl.num_programs(0) // blocks


@triton.jit
def _tile(index, tiles, column, inside, M, C, BLOCK_M: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr):
    """Return the offset of the first element of a tile, the offsets from there, and the mask."""
    if REVERSE:
        index = tiles - 1 - index
    row = tl.arange(0, BLOCK_M)
    base = tl.full((), BLOCK_M, tl.int64) * C * index
    offset = row[:, None] * C + column[None, :]
    if EVEN:
        mask = inside
    else:
        mask = (index * BLOCK_M + row < M)[:, None] & inside[None, :]
    return base, offset, mask


@triton.jit
def _bit_addresses(index, tiles, M, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, REVERSE: tl.constexpr):
    """Return offsets and mask of the bytes with the bits of a tile; a byte is for 8 neighbouring channels."""
    if REVERSE:
        index = tiles - 1 - index
    row = tl.arange(0, BLOCK_M)
    byte = tl.program_id(0) % tl.cdiv(C, BLOCK_C) * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)
    offset = (tl.full((), BLOCK_M, tl.int64) * index + row)[:, None] * (C // 8) + byte[None, :]
    return offset, (index * BLOCK_M + row < M)[:, None] & (byte < C // 8)[None, :]


@triton.jit
def moments_kernel(
    x_ptr,  # (M, C)
    partial_ptr,  # (2, programs, C) fp32: sums of x - pivot and of its square
    M,
    C,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Write the partial moments, the first pass of forward. Grid (ceil(columns / BLOCK_C) * programs,)."""
    column, inside = _columns(C, BLOCK_C)
    first, programs = _first_and_step(C, BLOCK_C)
    tiles = tl.cdiv(M, BLOCK_M)
    pivot = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    square = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for index in tl.range(first, tiles, programs, num_stages=STAGES):
        base, offset, mask = _tile(index, tiles, column, inside, M, C, BLOCK_M, EVEN, REVERSE)
        shifted = load_tile(x_ptr + base, offset, mask, EVEN) - pivot
        if not EVEN:
            shifted = tl.where(mask, shifted, 0.0)
        total += shifted
        square += shifted * shifted
    position = first * C + column
    tl.store(partial_ptr + position, tl.sum(total, 0), mask=inside)
    tl.store(partial_ptr + programs * C + position, tl.sum(square, 0), mask=inside)


@triton.jit
def _sum_partial(one_ptr, other_ptr, programs, column, inside, C, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the column sums of two (programs, C) matrices. All loads are in flight at once if CHUNK >= programs."""
    one = tl.zeros((CHUNK, BLOCK_C), tl.float32)
    other = tl.zeros((CHUNK, BLOCK_C), tl.float32)
    for start in range(0, programs, CHUNK):
        row = start + tl.arange(0, CHUNK)
        mask = (row < programs)[:, None] & inside[None, :]
        offset = row[:, None] * C + column[None, :]
        one += tl.load(one_ptr + offset, mask=mask, other=0.0)
        other += tl.load(other_ptr + offset, mask=mask, other=0.0)
    return tl.sum(one, 0), tl.sum(other, 0)


@triton.jit
def _load_parameters(weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, column, inside):
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    running_mean = tl.load(running_mean_ptr + column, mask=inside, other=0.0)
    running_var = tl.load(running_var_ptr + column, mask=inside, other=0.0)
    return weight, bias, running_mean, running_var


@triton.jit
def _store_statistics(
    mean, squares, count, weight, bias, running_mean, running_var, running_mean_ptr, running_var_ptr, statistics_ptr,
    column, inside, C, momentum, eps,
):  # fmt: skip
    """Write the (5, C) statistics and update the running ones. ``squares`` is the sum of squared deviations."""
    rstd = 1.0 / tl.sqrt(squares / count + eps)
    scale = weight * rstd
    tl.store(statistics_ptr + column, scale, mask=inside)
    tl.store(statistics_ptr + C + column, bias - mean * scale, mask=inside)
    tl.store(statistics_ptr + 2 * C + column, mean, mask=inside)
    tl.store(statistics_ptr + 3 * C + column, rstd, mask=inside)
    tl.store(statistics_ptr + 4 * C + column, 1.0 / count + tl.zeros_like(mean), mask=inside)
    unbiased = squares / tl.maximum(count - 1.0, 1.0)
    tl.store(running_mean_ptr + column, running_mean + momentum * (mean - running_mean), mask=inside)
    tl.store(running_var_ptr + column, running_var + momentum * (unbiased - running_var), mask=inside)


@triton.jit
def statistics_kernel(
    x_ptr,  # (M, C); row 0 is the pivot if PIVOT
    partial_ptr,  # (2, programs, C): sums of x (minus the pivot if PIVOT) and of its square
    weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr,  # (C,) fp32
    result_ptr,  # (5, C) statistics, or if GROUP (3, C): mean, sum of squared deviations and count of this rank
    programs, M, C, momentum, eps,
    PIVOT: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write statistics and update the running ones, or if GROUP write only moments. Grid (ceil(C / BLOCK_C),)."""
    column, inside = _columns(C, BLOCK_C)
    count = M * 1.0
    if PIVOT:
        pivot = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    else:
        pivot = tl.zeros((BLOCK_C,), tl.float32)
    weight, bias, running_mean, running_var = _load_parameters(
        weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, column, inside
    )
    total, square = _sum_partial(partial_ptr, partial_ptr + programs * C, programs, column, inside, C, CHUNK, BLOCK_C)
    mean = pivot + total / count
    squares = tl.maximum(square - total * total / count, 0.0)
    if GROUP:
        tl.store(result_ptr + column, mean, mask=inside)
        tl.store(result_ptr + C + column, squares, mask=inside)
        tl.store(result_ptr + 2 * C + column, count + tl.zeros_like(mean), mask=inside)
    else:
        _store_statistics(
            mean, squares, count, weight, bias, running_mean, running_var, running_mean_ptr, running_var_ptr,
            result_ptr, column, inside, C, momentum, eps,
        )  # fmt: skip


@triton.jit
def group_statistics_kernel(
    moments_ptr,  # (ranks, 3, C) fp32
    weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr,  # (C,) fp32
    statistics_ptr,  # (5, C)
    ranks, C, momentum, eps,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Merge the moments of a group's ranks (Chan et al. 1979), write the statistics and update the running ones."""
    column, inside = _columns(C, BLOCK_C)
    mean = tl.zeros((BLOCK_C,), tl.float32)
    squares = tl.zeros((BLOCK_C,), tl.float32)
    count = tl.zeros((BLOCK_C,), tl.float32)
    for rank in range(ranks):
        own_ptr = moments_ptr + rank * 3 * C + column
        other = tl.load(own_ptr + 2 * C, mask=inside, other=1.0)
        difference = tl.load(own_ptr, mask=inside, other=0.0) - mean
        both = count + other
        mean += difference * (other / both)
        squares += tl.load(own_ptr + C, mask=inside, other=0.0) + difference * difference * (count * other / both)
        count = both
    weight, bias, running_mean, running_var = _load_parameters(
        weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, column, inside
    )
    _store_statistics(
        mean, squares, count, weight, bias, running_mean, running_var, running_mean_ptr, running_var_ptr,
        statistics_ptr, column, inside, C, momentum, eps,
    )  # fmt: skip


@triton.jit
def normalise_kernel(
    x_ptr,  # (M, C)
    statistics_ptr,  # (5, C)
    residual_ptr,  # (M, C) if RESIDUAL
    residual_statistics_ptr,  # (5, C) if RESIDUAL_NORM
    y_ptr,  # (M, C)
    bits_ptr,  # (M, C / 8) uint8 if RESIDUAL: where y is positive
    M,
    C,
    RELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RESIDUAL_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Write y, and its bits if RESIDUAL, the second pass of forward. Grid (ceil(columns / BLOCK_C) * programs,)."""
    column, inside = _columns(C, BLOCK_C)
    tiles = tl.cdiv(M, BLOCK_M)
    scale = tl.load(statistics_ptr + column, mask=inside, other=0.0)[None, :]
    shift = tl.load(statistics_ptr + C + column, mask=inside, other=0.0)[None, :]
    if RESIDUAL_NORM:
        residual_scale = tl.load(residual_statistics_ptr + column, mask=inside, other=0.0)[None, :]
        shift += tl.load(residual_statistics_ptr + C + column, mask=inside, other=0.0)[None, :]
    first, step = _first_and_step(C, BLOCK_C)
    for index in tl.range(first, tiles, step, num_stages=STAGES):
        base, offset, mask = _tile(index, tiles, column, inside, M, C, BLOCK_M, EVEN, REVERSE)
        y = load_tile(x_ptr + base, offset, mask, EVEN) * scale + shift
        if RESIDUAL:
            residual = load_tile(residual_ptr + base, offset, mask, EVEN)
            if RESIDUAL_NORM:
                residual *= residual_scale
            y += residual
        if RELU:
            if RESIDUAL:
                bit = tl.reshape((y > 0.0).to(tl.int32), (BLOCK_M, BLOCK_C // 8, 8))
                packed = tl.sum(bit << tl.arange(0, 8)[None, None, :], 2).to(tl.uint8)
                byte, valid = _bit_addresses(index, tiles, M, C, BLOCK_M, BLOCK_C, REVERSE)
                store_tile(bits_ptr, byte, packed, valid, EVEN)
            y = tl.maximum(y, 0.0)
        store_tile(y_ptr + base, offset, y, mask, EVEN)


@triton.jit
def gradient_sums_kernel(
    dy_ptr,  # (M, C)
    other_dy_ptr,  # (M, C) if FORK: the gradient from y's second consumer
    x_ptr,  # (M, C)
    residual_ptr,  # (M, C) if RESIDUAL_NORM
    statistics_ptr,  # (5, C)
    residual_statistics_ptr,  # (5, C) if RESIDUAL_NORM
    bits_ptr,  # (M, C / 8) if RESIDUAL
    dz_ptr,  # (M, C) if RESIDUAL: gradient of the input of ReLU, which is also that of the residual
    partial_ptr,  # (2 or 3, programs, C) fp32: sums of dz, of dz * (x - mean) and of dz * (residual - its mean)
    M,
    C,
    FORK: tl.constexpr,
    RELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RESIDUAL_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Write partial sums, and dz if RESIDUAL, the first pass of backward. Grid (ceil(C / BLOCK_C) * programs,)."""
    column, inside = _columns(C, BLOCK_C)
    first, programs = _first_and_step(C, BLOCK_C)
    tiles = tl.cdiv(M, BLOCK_M)
    mean = tl.load(statistics_ptr + 2 * C + column, mask=inside, other=0.0)[None, :]
    if RELU and not RESIDUAL:
        scale = tl.load(statistics_ptr + column, mask=inside, other=0.0)[None, :]
        shift = tl.load(statistics_ptr + C + column, mask=inside, other=0.0)[None, :]
    if RESIDUAL_NORM:
        residual_mean = tl.load(residual_statistics_ptr + 2 * C + column, mask=inside, other=0.0)[None, :]
        residual_product = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for index in tl.range(first, tiles, programs, num_stages=STAGES):
        base, offset, mask = _tile(index, tiles, column, inside, M, C, BLOCK_M, EVEN, REVERSE)
        dz = load_tile(dy_ptr + base, offset, mask, EVEN)
        x = load_tile(x_ptr + base, offset, mask, EVEN)
        if FORK:
            dz += load_tile(other_dy_ptr + base, offset, mask, EVEN)
        if RESIDUAL:
            byte, valid = _bit_addresses(index, tiles, M, C, BLOCK_M, BLOCK_C, REVERSE)
            if EVEN:
                packed = tl.load(bits_ptr + byte).to(tl.int32)
            else:
                packed = tl.load(bits_ptr + byte, mask=valid, other=0).to(tl.int32)
            bit = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
            dz = tl.where(tl.reshape(bit, (BLOCK_M, BLOCK_C)) != 0, dz, 0.0)
            rounded = dz.to(dz_ptr.dtype.element_ty)
            store_tile(dz_ptr + base, offset, rounded, mask, EVEN)
            dz = rounded.to(tl.float32)
        elif RELU:
            dz = tl.where(x * scale + shift > 0.0, dz, 0.0)
        total += dz
        product += dz * (x - mean)
        if RESIDUAL_NORM:
            residual_product += dz * (load_tile(residual_ptr + base, offset, mask, EVEN) - residual_mean)
    position = first * C + column
    tl.store(partial_ptr + position, tl.sum(total, 0), mask=inside)
    tl.store(partial_ptr + programs * C + position, tl.sum(product, 0), mask=inside)
    if RESIDUAL_NORM:
        tl.store(partial_ptr + 2 * programs * C + position, tl.sum(residual_product, 0), mask=inside)


@triton.jit
def _store_coefficients(d_bias, d_weight, statistics_ptr, coefficients_ptr, column, inside, C):
    """Write dx = scale * (dz - mean(dz) - xhat * mean(dz * xhat)) as an affine map (arXiv:1502.03167, section 3)."""
    scale = tl.load(statistics_ptr + column, mask=inside, other=0.0)
    mean = tl.load(statistics_ptr + 2 * C + column, mask=inside, other=0.0)
    rstd = tl.load(statistics_ptr + 3 * C + column, mask=inside, other=0.0)
    share = tl.load(statistics_ptr + 4 * C + column, mask=inside, other=0.0)
    slope = -scale * rstd * d_weight * share
    tl.store(coefficients_ptr + column, scale, mask=inside)
    tl.store(coefficients_ptr + C + column, slope, mask=inside)
    tl.store(coefficients_ptr + 2 * C + column, -scale * d_bias * share - slope * mean, mask=inside)


@triton.jit
def coefficients_kernel(
    total_ptr, product_ptr,  # (programs, C) fp32: partial sums of dz and of dz * (x - mean)
    statistics_ptr,  # (5, C)
    gradients_ptr,  # (2, C) fp32: gradients of bias and weight
    coefficients_ptr,  # (3, C) unless GROUP
    programs, C,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradients of bias and weight and, unless GROUP, the coefficients. Grid (ceil(columns / BLOCK_C),)."""
    column, inside = _columns(C, BLOCK_C)
    rstd = tl.load(statistics_ptr + 3 * C + column, mask=inside, other=0.0)
    d_bias, d_weight = _sum_partial(total_ptr, product_ptr, programs, column, inside, C, CHUNK, BLOCK_C)
    d_weight *= rstd
    tl.store(gradients_ptr + column, d_bias, mask=inside)
    tl.store(gradients_ptr + C + column, d_weight, mask=inside)
    if not GROUP:
        _store_coefficients(d_bias, d_weight, statistics_ptr, coefficients_ptr, column, inside, C)


@triton.jit
def group_coefficients_kernel(gradients_ptr, statistics_ptr, coefficients_ptr, C, BLOCK_C: tl.constexpr):
    """Write the coefficients from the (2, C) sums over the ranks of a group. Grid (ceil(columns / BLOCK_C),)."""
    column, inside = _columns(C, BLOCK_C)
    d_bias = tl.load(gradients_ptr + column, mask=inside, other=0.0)
    d_weight = tl.load(gradients_ptr + C + column, mask=inside, other=0.0)
    _store_coefficients(d_bias, d_weight, statistics_ptr, coefficients_ptr, column, inside, C)


@triton.jit
def input_gradient_kernel(
    dz_ptr,  # (M, C)
    x_ptr,  # (M, C)
    residual_ptr,  # (M, C) if RESIDUAL_NORM
    statistics_ptr,  # (5, C), read if RELU
    coefficients_ptr,  # (3, C)
    residual_coefficients_ptr,  # (3, C) if RESIDUAL_NORM
    dx_ptr,  # (M, C)
    d_residual_ptr,  # (M, C) if RESIDUAL_NORM
    M,
    C,
    RELU: tl.constexpr,  # whether to mask dz by the sign of x * scale + shift
    RESIDUAL_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Write dx, and d_residual if RESIDUAL_NORM, the second pass of backward. Grid (ceil(C / BLOCK_C) * programs,)."""
    column, inside = _columns(C, BLOCK_C)
    tiles = tl.cdiv(M, BLOCK_M)
    a = tl.load(coefficients_ptr + column, mask=inside, other=0.0)[None, :]
    b = tl.load(coefficients_ptr + C + column, mask=inside, other=0.0)[None, :]
    c = tl.load(coefficients_ptr + 2 * C + column, mask=inside, other=0.0)[None, :]
    if RELU:
        scale = tl.load(statistics_ptr + column, mask=inside, other=0.0)[None, :]
        shift = tl.load(statistics_ptr + C + column, mask=inside, other=0.0)[None, :]
    if RESIDUAL_NORM:
        residual_a = tl.load(residual_coefficients_ptr + column, mask=inside, other=0.0)[None, :]
        residual_b = tl.load(residual_coefficients_ptr + C + column, mask=inside, other=0.0)[None, :]
        residual_c = tl.load(residual_coefficients_ptr + 2 * C + column, mask=inside, other=0.0)[None, :]
    first, step = _first_and_step(C, BLOCK_C)
    for index in tl.range(first, tiles, step, num_stages=STAGES):
        base, offset, mask = _tile(index, tiles, column, inside, M, C, BLOCK_M, EVEN, REVERSE)
        dz = load_tile(dz_ptr + base, offset, mask, EVEN)
        x = load_tile(x_ptr + base, offset, mask, EVEN)
        if RELU:
            dz = tl.where(x * scale + shift > 0.0, dz, 0.0)
        store_tile(dx_ptr + base, offset, a * dz + b * x + c, mask, EVEN)
        if RESIDUAL_NORM:
            residual = load_tile(residual_ptr + base, offset, mask, EVEN)
            d_residual = residual_a * dz + residual_b * residual + residual_c
            store_tile(d_residual_ptr + base, offset, d_residual, mask, EVEN)
