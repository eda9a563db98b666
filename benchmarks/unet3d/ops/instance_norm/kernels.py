# mypy: allow-untyped-defs
"""Triton kernels of instance norm and ReLU over N samples of V voxels and C channels, in memory (N, V, C).

Large volumes take three launches per direction. Forward reads x for the moments and again to normalise; backward
reads the gradient and x for two sums and again for the gradient of x. In between, a small kernel merges the programs'
results. A program processes ``BLOCK_C`` columns of a sample in tiles of ``BLOCK_V`` voxels. The second pass runs in
the opposite direction (``REVERSE``), so that the last data of the first pass are still in the L2 cache. Backward
computes the sign before the ReLU again, so only x, mean and 1 / deviation are kept. Small volumes take one launch per
direction, with a whole instance in the registers of a program.

If the result has two readers, as before a skip connection, backward adds their gradients in registers (``FORK``).
Rows of the second gradient may have a stride larger than C, as in a slice of concatenated channels.

Partial moments come from :mod:`common.ops.norm.moments` and are merged here. All merges have a fixed order, so
results are reproducible.

``statistics`` is (2, N, C) fp32: mean and 1 / standard deviation. ``sums`` is (2, N, C) fp32: of dz and of dz * xhat,
where dz is the gradient before the ReLU. Then dx = weight / deviation * (dz - mean(dz) - xhat * mean(dz * xhat)).
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.norm.moments import voxels_of
from common.ops.tiling import load_row, load_tile, own_columns, store_tile, tile_at


@triton.jit
def statistics_kernel(
    partial_ptr,  # (2, N, programs, C) fp32
    result_ptr,  # (2, N, C) fp32: statistics, or of a SLAB mean and sum of squares about it
    programs, V, C, epsilon,
    SLAB: tl.constexpr, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the statistics, or if SLAB the moments. Grid (ceil(columns / BLOCK_C), N), BLOCK_P >= programs."""
    sample, samples = tl.program_id(1), tl.num_programs(1)
    column, inside = own_columns(0, C, BLOCK_C)
    program = tl.arange(0, BLOCK_P)
    valid = program < programs
    voxels = tl.where(valid, voxels_of(program, programs, tl.cdiv(V, BLOCK_V), V, BLOCK_V, REVERSE), 0)[:, None]
    offset = (sample * programs + program)[:, None] * C + column[None, :]
    mask = valid[:, None] & inside[None, :]
    means = tl.load(partial_ptr + offset, mask=mask, other=0.0)
    squares = tl.load(partial_ptr + samples * programs * C + offset, mask=mask, other=0.0)
    pivot = tl.load(partial_ptr + sample * programs * C + column, mask=inside, other=0.0)
    mean = pivot + tl.sum((means - pivot[None, :]) * voxels, 0) / V
    difference = means - mean[None, :]
    square = tl.sum(squares + difference * difference * voxels, 0)
    position = sample * C + column
    tl.store(result_ptr + position, mean, mask=inside)
    second = square if SLAB else 1.0 / tl.sqrt(square / V + epsilon)
    tl.store(result_ptr + samples * C + position, second, mask=inside)


@triton.jit
def slab_statistics_kernel(
    gathered_ptr,  # (ranks, 2, NC) fp32: of each slab mean and sum of squares about it
    statistics_ptr,  # (2, NC) fp32
    ranks, V, NC, epsilon,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the statistics of volumes from their slabs, each of V voxels. Grid (ceil(NC / BLOCK),)."""
    instance = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = instance < NC
    mean = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for rank in range(ranks):
        slab_ptr = gathered_ptr + rank * 2 * NC + instance
        difference = tl.load(slab_ptr, mask=inside, other=0.0) - mean
        mean += difference / (rank + 1.0)
        square += tl.load(slab_ptr + NC, mask=inside, other=0.0) + difference * difference * (V * (rank / (rank + 1.0)))
    tl.store(statistics_ptr + instance, mean, mask=inside)
    tl.store(statistics_ptr + NC + instance, 1.0 / tl.sqrt(square / (V * 1.0 * ranks) + epsilon), mask=inside)


@triton.jit
def normalise_kernel(
    x_ptr,  # (N, V, C)
    weight_ptr, bias_ptr,  # (C,)
    statistics_ptr,  # (2, N, C)
    y_ptr,  # (N, V, C)
    V, C,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write y, the second pass of forward. Grid (programs, ceil(columns / BLOCK_C), N)."""
    column, inside = own_columns(1, C, BLOCK_C)
    tiles = tl.cdiv(V, BLOCK_V)
    own = statistics_ptr + tl.program_id(2) * C
    mean = load_row(own, column, inside)
    scale = load_row(own + tl.num_programs(2) * C, column, inside) * load_row(weight_ptr, column, inside)
    bias = load_row(bias_ptr, column, inside)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        y = (load_tile(x_ptr + base, offset, mask, EVEN) - mean) * scale + bias
        store_tile(y_ptr + base, offset, tl.maximum(y, 0.0), mask, EVEN)


@triton.jit
def _load_gradient(
    dy_ptr, other_dy_ptr, other_stride, index, tiles, column, inside, V, C,
    FORK: tl.constexpr, BLOCK_V: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Load a tile of the gradient of the result, the sum of both readers' gradients if FORK."""
    base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
    dy = load_tile(dy_ptr + base, offset, mask, EVEN)
    if FORK:
        base, offset, mask = tile_at(index, tiles, column, inside, V, other_stride, BLOCK_V, EVEN, REVERSE)
        dy += load_tile(other_dy_ptr + base, offset, mask, EVEN)
    return dy


@triton.jit
def gradient_sums_kernel(
    dy_ptr,  # (N, V, C)
    other_dy_ptr, other_stride,  # (N, V, .) if FORK: gradient of the second reader, and elements from row to row
    x_ptr,  # (N, V, C)
    weight_ptr, bias_ptr,  # (C,)
    statistics_ptr,  # (2, N, C)
    partial_ptr,  # (2, N, programs, C) fp32: sums of dz and of dz * xhat
    V, C,
    FORK: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write partial sums, the first pass of backward. Grid (programs, ceil(columns / BLOCK_C), N)."""
    program, programs, sample = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    column, inside = own_columns(1, C, BLOCK_C)
    tiles = tl.cdiv(V, BLOCK_V)
    mean = load_row(statistics_ptr + sample * C, column, inside)
    rstd = tl.load(statistics_ptr + (tl.num_programs(2) + sample) * C + column, mask=inside, other=0.0)
    scale = rstd[None, :] * load_row(weight_ptr, column, inside)
    bias = load_row(bias_ptr, column, inside)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for index in tl.range(program, tiles, programs, num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        dy = _load_gradient(
            dy_ptr, other_dy_ptr, other_stride, index, tiles, column, inside, V, C, FORK, BLOCK_V, EVEN, REVERSE
        )
        centred = load_tile(x_ptr + base, offset, mask, EVEN) - mean
        dz = tl.where(centred * scale + bias > 0.0, dy, 0.0)
        total += dz
        product += dz * centred
    position = (sample * programs + program) * C + column
    tl.store(partial_ptr + position, tl.sum(total, 0), mask=inside)
    tl.store(partial_ptr + tl.num_programs(2) * programs * C + position, tl.sum(product, 0) * rstd, mask=inside)


@triton.jit
def sums_kernel(
    partial_ptr,  # (2, N, programs, C) fp32
    sums_ptr,  # (2, N, C) fp32, if SUMS
    gradients_ptr,  # (2, C): gradients of bias and weight
    N, programs, C,
    SUMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradients of bias and weight, and ``sums`` if SUMS, from the partial sums.

    Grid (ceil(columns / BLOCK_C), 2), BLOCK_P >= programs.
    """
    which = tl.program_id(1)
    column, inside = own_columns(0, C, BLOCK_C)
    program = tl.arange(0, BLOCK_P)
    whole = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, N, BLOCK_N):
        sample = start + tl.arange(0, BLOCK_N)
        row = ((which * N + sample) * programs)[:, None] + program[None, :]
        valid = (sample < N)[:, None] & (program < programs)[None, :]
        mask = valid[:, :, None] & inside[None, None, :]
        values = tl.load(partial_ptr + row[:, :, None] * C + column[None, None, :], mask=mask, other=0.0)
        of_samples = tl.sum(values, 1)
        if SUMS:
            offset = (which * N + sample)[:, None] * C + column[None, :]
            tl.store(sums_ptr + offset, of_samples, mask=(sample < N)[:, None] & inside[None, :])
        whole += tl.sum(of_samples, 0)
    tl.store(gradients_ptr + which * C + column, whole.to(gradients_ptr.dtype.element_ty), mask=inside)


@triton.jit
def input_gradient_kernel(
    dy_ptr,  # (N, V, C)
    other_dy_ptr, other_stride,  # as in the first pass
    x_ptr,  # (N, V, C)
    weight_ptr, bias_ptr,  # (C,)
    statistics_ptr,  # (2, N, C)
    sums_ptr,  # (2, N, C)
    dx_ptr,  # (N, V, C)
    V, C, share,
    FORK: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write dx, the second pass of backward. Grid (programs, ceil(columns / BLOCK_C), N).

    ``share`` is 1 / voxels of a volume.
    """
    column, inside = own_columns(1, C, BLOCK_C)
    tiles = tl.cdiv(V, BLOCK_V)
    first, second = tl.program_id(2) * C, (tl.num_programs(2) + tl.program_id(2)) * C
    mean = load_row(statistics_ptr + first, column, inside)
    rstd = load_row(statistics_ptr + second, column, inside)
    scale = rstd * load_row(weight_ptr, column, inside)
    bias = load_row(bias_ptr, column, inside)
    constant = load_row(sums_ptr + first, column, inside) * share
    slope = load_row(sums_ptr + second, column, inside) * share * rstd
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        dy = _load_gradient(
            dy_ptr, other_dy_ptr, other_stride, index, tiles, column, inside, V, C, FORK, BLOCK_V, EVEN, REVERSE
        )
        centred = load_tile(x_ptr + base, offset, mask, EVEN) - mean
        dz = tl.where(centred * scale + bias > 0.0, dy, 0.0)
        store_tile(dx_ptr + base, offset, scale * (dz - constant - centred * slope), mask, EVEN)


@triton.jit
def small_forward_kernel(
    x_ptr,  # (N, V, C)
    weight_ptr, bias_ptr,  # (C,)
    y_ptr,  # (N, V, C)
    statistics_ptr,  # (2, N, C)
    V, C, epsilon,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write y and statistics; an instance is in registers. Grid (1, ceil(columns / BLOCK_C), N), BLOCK_V >= V."""
    column, inside = own_columns(1, C, BLOCK_C)
    base, offset, mask = tile_at(0, 1, column, inside, V, C, BLOCK_V, EVEN, False)
    pivot = load_row(x_ptr + tl.program_id(2).to(tl.int64) * V * C, column, inside)
    shifted = load_tile(x_ptr + base, offset, mask, EVEN) - pivot
    if not EVEN:
        shifted = tl.where(mask, shifted, 0.0)
    shift = tl.sum(shifted, 0) / V
    centred = shifted - shift[None, :]
    counted = centred
    if not EVEN:
        counted = tl.where(mask, centred, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(counted * counted, 0) / V + epsilon)
    scale = rstd[None, :] * load_row(weight_ptr, column, inside)
    y = centred * scale + load_row(bias_ptr, column, inside)
    store_tile(y_ptr + base, offset, tl.maximum(y, 0.0), mask, EVEN)
    position = tl.program_id(2) * C + column
    tl.store(statistics_ptr + position, tl.sum(pivot, 0) + shift, mask=inside)
    tl.store(statistics_ptr + tl.num_programs(2) * C + position, rstd, mask=inside)


@triton.jit
def small_backward_kernel(
    dy_ptr,  # (N, V, C)
    other_dy_ptr, other_stride,  # as in large volumes
    x_ptr,  # (N, V, C)
    weight_ptr, bias_ptr,  # (C,)
    statistics_ptr,  # (2, N, C)
    dx_ptr,  # (N, V, C)
    sums_ptr,  # (2, N, C), of any dtype
    V, C,
    FORK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write dx and ``sums``, the gradients of bias and weight per sample. Grid as in the forward kernel."""
    column, inside = own_columns(1, C, BLOCK_C)
    first, second = tl.program_id(2) * C, (tl.num_programs(2) + tl.program_id(2)) * C
    base, offset, mask = tile_at(0, 1, column, inside, V, C, BLOCK_V, EVEN, False)
    rstd = load_row(statistics_ptr + second, column, inside)
    weight = load_row(weight_ptr, column, inside)
    dy = _load_gradient(dy_ptr, other_dy_ptr, other_stride, 0, 1, column, inside, V, C, FORK, BLOCK_V, EVEN, False)
    normal = (load_tile(x_ptr + base, offset, mask, EVEN) - load_row(statistics_ptr + first, column, inside)) * rstd
    dz = tl.where(normal * weight + load_row(bias_ptr, column, inside) > 0.0, dy, 0.0)
    total, product = tl.sum(dz, 0), tl.sum(dz * normal, 0)
    dx = rstd * weight * (dz - (total / V)[None, :] - normal * (product / V)[None, :])
    store_tile(dx_ptr + base, offset, dx, mask, EVEN)
    tl.store(sums_ptr + first + column, total.to(sums_ptr.dtype.element_ty), mask=inside)
    tl.store(sums_ptr + second + column, product.to(sums_ptr.dtype.element_ty), mask=inside)
