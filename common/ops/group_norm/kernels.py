# mypy: allow-untyped-defs
"""Triton kernels of group norm that take several launches, for samples whose groups are too large for one program.

Forward: moments of each channel in parts (:mod:`common.ops.norm.moments`), a merge to moments of each group, then a
second pass over x that normalises it. Backward: two sums over dy and x for each channel in parts, a merge, then a
second pass that writes the gradient of x. The merges add in a fixed order. The second pass walks in the opposite
direction (``REVERSE``), so that it finds the tiles that were read last in the L2 cache.

A value that is added to a channel of a sample only moves the mean of the channel. So only the merge reads ``added``,
and its gradient, the sum of dx over the pixels, follows from three sums without another pass.

Each pass over pixels reads one of the inputs: its ``own`` channels, of which the first is channel ``start`` of all
``C``. The merges read the partial sums of both inputs, because a group may span the pair. ``statistics`` is (2, N, G)
fp32: mean and 1 / standard deviation. Shapes: N samples, V pixels, G groups of WIDTH channels.

Bytes moved at 32 x 64 x 64 x 320 in 16 bits: forward 252 MB, backward 420 MB. If the L2 cache held everything that is
read twice, memory would move 168 MB and 252 MB.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.norm.moments import voxels_of
from common.ops.tiling import load_row, load_tile, own_columns, store_tile, tile_at

_MINUS_LOG2_E: tl.constexpr = tl.constexpr(-1.4426950408889634)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(z * _MINUS_LOG2_E))


@triton.jit
def activated(z, SILU: tl.constexpr):
    """Return SiLU of z, ``z * sigmoid(z)``, or z itself without SILU."""
    if SILU:
        return z * _sigmoid(z)
    else:
        return z


@triton.jit
def before_activation(dy, z, SILU: tl.constexpr):
    """Return the gradient of z from the gradient of ``activated(z)``."""
    if SILU:
        sigmoid = _sigmoid(z)
        return dy * sigmoid * (1.0 + z * (1.0 - sigmoid))
    else:
        return dy


@triton.jit
def load_statistics(
    statistics_ptr, added_ptr, channel, inside, sample, samples, C, G, WIDTH: tl.constexpr, ADDED: tl.constexpr
):
    """Return mean(x + added) - added, which centres x, and 1 / standard deviation, for channels of a sample."""
    group = channel // WIDTH
    centre = tl.load(statistics_ptr + sample * G + group, mask=inside, other=0.0)
    rstd = tl.load(statistics_ptr + (samples + sample) * G + group, mask=inside, other=0.0)
    if ADDED:
        centre -= tl.load(added_ptr + sample * C + channel, mask=inside, other=0.0).to(tl.float32)
    return centre, rstd


@triton.jit
def _load_partial(first_ptr, second_ptr, kind, program, programs, column, mask, C, SPLIT, PAIR: tl.constexpr):
    """Return the partial sums of a group of this sample as (BLOCK_P, BLOCK_W), from (kinds, N, programs, channels)."""
    row = ((kind * tl.num_programs(1) + tl.program_id(1)) * programs + program)[:, None]
    first_mask = mask & (column < SPLIT)[None, :]
    value = tl.load(first_ptr + row * SPLIT + column[None, :], mask=first_mask, other=0.0)
    if PAIR:
        offset = row * (C - SPLIT) + (column - SPLIT)[None, :]
        value += tl.load(second_ptr + offset, mask=mask & (column >= SPLIT)[None, :], other=0.0)
    return value


@triton.jit
def group_norm_statistics_kernel(
    first_ptr, second_ptr,  # (2, N, programs, SPLIT) fp32, and (2, N, programs, C - SPLIT) if PAIR
    added_ptr,  # (N, C) if ADDED
    statistics_ptr,  # (2, N, G) fp32
    programs, V, C, SPLIT, eps,
    PAIR: tl.constexpr, ADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_V: tl.constexpr, REVERSE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write the statistics from partial moments of x. Grid (G, N), BLOCK_P >= programs, BLOCK_W >= WIDTH."""
    group, sample = tl.program_id(0), tl.program_id(1)
    local, program = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_P)
    column, inside, valid = group * WIDTH + local, local < WIDTH, program < programs
    mask = valid[:, None] & inside[None, :]
    means = _load_partial(first_ptr, second_ptr, 0, program, programs, column, mask, C, SPLIT, PAIR)
    squares = _load_partial(first_ptr, second_ptr, 1, program, programs, column, mask, C, SPLIT, PAIR)
    if ADDED:
        means += tl.load(added_ptr + sample * C + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tiles = tl.cdiv(V, BLOCK_V)
    voxels = voxels_of(program, programs, tiles, V, BLOCK_V, REVERSE).to(tl.float32)
    count = tl.where(mask, voxels[:, None], 0.0)
    # close to the group's mean, so that the sums below lose little precision
    pivot = tl.sum(tl.sum(tl.where((program == 0)[:, None] & inside[None, :], means, 0.0), 1), 0) / WIDTH
    shares = count / (V * WIDTH)
    mean = pivot + tl.sum(tl.sum((means - pivot) * shares, 1), 0)
    away = means - mean
    variance = tl.sum(tl.sum(squares / (V * WIDTH) + away * away * shares, 1), 0)
    offset = sample * tl.num_programs(0) + group
    tl.store(statistics_ptr + offset, mean)
    tl.store(statistics_ptr + tl.num_programs(1) * tl.num_programs(0) + offset, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def group_norm_normalise_kernel(
    x_ptr,  # (N, V, own)
    added_ptr,  # (N, C) if ADDED
    weight_ptr, bias_ptr,  # (C,)
    statistics_ptr,  # (2, N, G) fp32
    y_ptr,  # (N, V, C)
    V, own, start, C, G,
    ADDED: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write one input's channels of y, the second pass of forward. Grid (programs, ceil(columns / BLOCK_C), N)."""
    column, inside = own_columns(1, own, BLOCK_C)
    channel = start + column
    sample, samples = tl.program_id(2), tl.num_programs(2)
    centre, rstd = load_statistics(statistics_ptr, added_ptr, channel, inside, sample, samples, C, G, WIDTH, ADDED)
    scale = rstd[None, :] * load_row(weight_ptr, channel, inside)
    bias = load_row(bias_ptr, channel, inside)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, own, BLOCK_V, EVEN, REVERSE)
        z = (load_tile(x_ptr + base, offset, mask, EVEN) - centre[None, :]) * scale + bias
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        store_tile(y_ptr + base + start, offset, activated(z, SILU), mask, EVEN)


@triton.jit
def _normal_and_dz(
    dy_ptr, x_ptr, centre, rstd, weight, bias, index, tiles, column, inside, V, own, start, C,
    SILU: tl.constexpr, BLOCK_V: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Return the standardised x of a tile (0 where no element exists) and the gradient in front of the activation."""
    base, offset, mask = tile_at(index, tiles, column, inside, V, own, BLOCK_V, EVEN, REVERSE)
    normal = (load_tile(x_ptr + base, offset, mask, EVEN) - centre) * rstd
    if not EVEN:
        normal = tl.where(mask, normal, 0.0)
    base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
    dy = load_tile(dy_ptr + base + start, offset, mask, EVEN)
    return normal, before_activation(dy, normal * weight + bias, SILU)


@triton.jit
def group_norm_gradient_sums_kernel(
    dy_ptr,  # (N, V, C)
    x_ptr,  # (N, V, own)
    added_ptr,  # (N, C) if ADDED
    weight_ptr, bias_ptr,  # (C,)
    statistics_ptr,  # (2, N, G) fp32
    partial_ptr,  # (3 if ADDED else 2, N, programs, own) fp32: sums of dz, dz * normal, normal
    V, own, start, C, G,
    ADDED: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write partial sums of one input, the first pass of backward. Grid (programs, ceil(columns / BLOCK_C), N)."""
    column, inside = own_columns(1, own, BLOCK_C)
    channel = start + column
    sample, samples = tl.program_id(2), tl.num_programs(2)
    centre, rstd = load_statistics(statistics_ptr, added_ptr, channel, inside, sample, samples, C, G, WIDTH, ADDED)
    weight, bias = load_row(weight_ptr, channel, inside), load_row(bias_ptr, channel, inside)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    if ADDED:
        normals = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        normal, dz = _normal_and_dz(
            dy_ptr, x_ptr, centre[None, :], rstd[None, :], weight, bias, index, tiles, column, inside, V, own, start, C,
            SILU, BLOCK_V, EVEN, REVERSE,
        )  # fmt: skip
        total += dz
        product += dz * normal
        if ADDED:
            normals += normal
    plane = samples * tl.num_programs(0) * own
    target_ptr = partial_ptr + (sample * tl.num_programs(0) + tl.program_id(0)) * own + column
    tl.store(target_ptr, tl.sum(total, 0), mask=inside)
    tl.store(target_ptr + plane, tl.sum(product, 0), mask=inside)
    if ADDED:
        tl.store(target_ptr + 2 * plane, tl.sum(normals, 0), mask=inside)


@triton.jit
def group_norm_coefficients_kernel(
    first_ptr, second_ptr,  # (3 if ADDED else 2, N, programs, SPLIT) fp32, and (..., C - SPLIT) if PAIR
    weight_ptr,  # (C,)
    statistics_ptr,  # (2, N, G) fp32
    sums_ptr,  # (N, 2, C) fp32: sums of dz and of dz * normal
    coefficients_ptr,  # (2, N, G) fp32: means over the group of weight * dz and of weight * dz * normal
    d_added_ptr,  # (N, C), written if ADDED
    programs, V, C, SPLIT,
    PAIR: tl.constexpr, ADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write sums, coefficients and, if ADDED, d_added. Grid (G, N), BLOCK_P >= programs, BLOCK_W >= WIDTH."""
    group, sample = tl.program_id(0), tl.program_id(1)
    local, program = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_P)
    column, inside = group * WIDTH + local, local < WIDTH
    mask = (program < programs)[:, None] & inside[None, :]
    total = tl.sum(_load_partial(first_ptr, second_ptr, 0, program, programs, column, mask, C, SPLIT, PAIR), 0)
    product = tl.sum(_load_partial(first_ptr, second_ptr, 1, program, programs, column, mask, C, SPLIT, PAIR), 0)
    tl.store(sums_ptr + sample * 2 * C + column, total, mask=inside)
    tl.store(sums_ptr + (sample * 2 + 1) * C + column, product, mask=inside)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    constant = tl.sum(weight * total, 0) / (V * WIDTH)
    slope = tl.sum(weight * product, 0) / (V * WIDTH)
    offset, plane = sample * tl.num_programs(0) + group, tl.num_programs(1) * tl.num_programs(0)
    tl.store(coefficients_ptr + offset, constant)
    tl.store(coefficients_ptr + plane + offset, slope)
    if ADDED:
        normals = tl.sum(_load_partial(first_ptr, second_ptr, 2, program, programs, column, mask, C, SPLIT, PAIR), 0)
        rstd = tl.load(statistics_ptr + plane + offset)
        d_added = rstd * (weight * total - constant * V - slope * normals)
        tl.store(d_added_ptr + sample * C + column, d_added.to(d_added_ptr.dtype.element_ty), mask=inside)


@triton.jit
def group_norm_input_gradient_kernel(
    dy_ptr,  # (N, V, C)
    kept_ptr,  # (N, V, own) if KEPT: added to the gradient
    x_ptr,  # (N, V, own)
    added_ptr,  # (N, C) if ADDED
    weight_ptr, bias_ptr,  # (C,)
    statistics_ptr, coefficients_ptr,  # (2, N, G) fp32
    dx_ptr,  # (N, V, own)
    V, own, start, C, G,
    KEPT: tl.constexpr, ADDED: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one input, the second pass of backward. Grid (programs, ceil(columns / BLOCK_C), N)."""
    column, inside = own_columns(1, own, BLOCK_C)
    channel = start + column
    sample, samples = tl.program_id(2), tl.num_programs(2)
    centre, rstd = load_statistics(statistics_ptr, added_ptr, channel, inside, sample, samples, C, G, WIDTH, ADDED)
    weight, bias = load_row(weight_ptr, channel, inside), load_row(bias_ptr, channel, inside)
    constant, slope = load_statistics(coefficients_ptr, added_ptr, channel, inside, sample, samples, C, G, WIDTH, False)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        normal, dz = _normal_and_dz(
            dy_ptr, x_ptr, centre[None, :], rstd[None, :], weight, bias, index, tiles, column, inside, V, own, start, C,
            SILU, BLOCK_V, EVEN, REVERSE,
        )  # fmt: skip
        dx = rstd[None, :] * (dz * weight - constant[None, :] - normal * slope[None, :])
        base, offset, mask = tile_at(index, tiles, column, inside, V, own, BLOCK_V, EVEN, REVERSE)
        if KEPT:
            dx += load_tile(kept_ptr + base, offset, mask, EVEN)
        store_tile(dx_ptr + base, offset, dx, mask, EVEN)
