# mypy: allow-untyped-defs
"""Triton kernels of group norm with one launch per direction, for samples whose groups are small.

A program owns a slab: the channels of ``GROUPS`` groups of ``WIDTH``, over all V pixels of a sample. If one tile holds
the slab (``HELD``), x is read once. Otherwise x is read twice, the second time from the L2 cache, which still contains
slabs of up to some hundred KB. Forward computes the sums relative to the mean of the slab's first pixels.

A pair of inputs, (N, V, SPLIT) and (N, V, C - SPLIT), is read as its concatenation. A group may span both, so each
tile is loaded from both with masks. With a single input SPLIT is C.

``statistics`` is (2, N, G) fp32: mean and 1 / standard deviation. Shapes: N samples, V pixels, C channels, G groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.group_norm.kernels import activated, before_activation, load_statistics


@triton.jit
def _own_columns(WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return this program's columns, a mask of those that exist, and their groups."""
    local = tl.arange(0, BLOCK_C)
    column = tl.program_id(0) * (WIDTH * GROUPS) + local
    return column, local < WIDTH * GROUPS, column // WIDTH


@triton.jit
def _over_group(value, group, inside, GROUPS: tl.constexpr):
    """Return for each column the sum of ``value`` over the columns of its group."""
    value = tl.where(inside, value, 0.0)
    if GROUPS == 1:
        return tl.sum(value, 0) + tl.zeros_like(value)
    else:
        return tl.sum(tl.where(group[:, None] == group[None, :], value[:, None], 0.0), 0)


@triton.jit
def _tile(start, V, inside, BLOCK_V: tl.constexpr):
    """Return the pixels of a tile, and a mask of its elements that exist."""
    voxel = start + tl.arange(0, BLOCK_V)
    return voxel, (voxel < V)[:, None] & inside[None, :]


@triton.jit
def _load(first_ptr, second_ptr, voxel, column, mask, sample, V, C, SPLIT, PAIR: tl.constexpr):
    """Return a tile of the concatenated inputs in fp32."""
    first = first_ptr + sample * V * SPLIT
    if PAIR:
        second = second_ptr + sample * V * (C - SPLIT)
        in_first = mask & (column < SPLIT)[None, :]
        in_second = mask & (column >= SPLIT)[None, :]
        x = tl.load(first + voxel[:, None] * SPLIT + column[None, :], mask=in_first, other=0.0)
        other = tl.load(second + voxel[:, None] * (C - SPLIT) + (column - SPLIT)[None, :], mask=in_second, other=0.0)
        return x.to(tl.float32) + other.to(tl.float32)
    else:
        return tl.load(first + voxel[:, None] * SPLIT + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(first_ptr, second_ptr, value, voxel, column, mask, sample, V, C, SPLIT, PAIR: tl.constexpr):
    """Store a tile of the concatenation to its parts, at the positions from which :func:`_load` reads."""
    first = first_ptr + sample * V * SPLIT
    value = value.to(first_ptr.dtype.element_ty)
    if PAIR:
        second = second_ptr + sample * V * (C - SPLIT)
        in_first = mask & (column < SPLIT)[None, :]
        in_second = mask & (column >= SPLIT)[None, :]
        tl.store(first + voxel[:, None] * SPLIT + column[None, :], value, mask=in_first)
        tl.store(second + voxel[:, None] * (C - SPLIT) + (column - SPLIT)[None, :], value, mask=in_second)
    else:
        tl.store(first + voxel[:, None] * SPLIT + column[None, :], value, mask=mask)


@triton.jit
def group_norm_slab_forward_kernel(
    first_ptr, second_ptr,  # (N, V, SPLIT), and (N, V, C - SPLIT) if PAIR
    added_ptr,  # (N, C) if ADDED
    weight_ptr, bias_ptr,  # (C,)
    y_ptr,  # (N, V, C)
    statistics_ptr,  # (2, N, G) fp32
    V, C, SPLIT, eps,
    PAIR: tl.constexpr, ADDED: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the normalised values of GROUPS groups of a sample, after SiLU if SILU, and their means and 1 / deviations.

    Grid (G / GROUPS, N), BLOCK_C >= WIDTH * GROUPS, BLOCK_V >= V if HELD (the input is then read only once).
    """
    sample, samples, G = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.num_programs(0) * GROUPS
    column, inside, group = _own_columns(WIDTH, GROUPS, BLOCK_C)
    added = tl.zeros((BLOCK_C,), tl.float32)
    if ADDED:
        added += tl.load(added_ptr + sample * C + column, mask=inside, other=0.0).to(tl.float32)
    voxel, mask = _tile(0, V, inside, BLOCK_V)
    x = _load(first_ptr, second_ptr, voxel, column, mask, sample, V, C, SPLIT, PAIR)
    if HELD:
        mean = _over_group(tl.sum(x, 0) / V + added, group, inside, GROUPS) / WIDTH
        centred = tl.where(mask, x - (mean - added)[None, :], 0.0)
        variance = _over_group(tl.sum(centred * centred, 0), group, inside, GROUPS) / (V * WIDTH)
    else:
        pivot = tl.sum(x, 0) / tl.minimum(V, BLOCK_V)
        total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
        square = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
        for start in tl.range(0, V, BLOCK_V, num_stages=STAGES):
            voxel, mask = _tile(start, V, inside, BLOCK_V)
            x = _load(first_ptr, second_ptr, voxel, column, mask, sample, V, C, SPLIT, PAIR)
            shifted = tl.where(mask, x - pivot[None, :], 0.0)
            total += shifted
            square += shifted * shifted
        shift = tl.sum(total, 0) / V
        about_mean = tl.maximum(tl.sum(square, 0) - shift * shift * V, 0.0)
        own_mean = pivot + shift + added
        mean = _over_group(own_mean, group, inside, GROUPS) / WIDTH
        away = own_mean - mean
        variance = _over_group(about_mean + away * away * V, group, inside, GROUPS) / (V * WIDTH)
    rstd = 1.0 / tl.sqrt(variance + eps)
    leads = inside & (column % WIDTH == 0)
    tl.store(statistics_ptr + sample * G + group, mean, mask=leads)
    tl.store(statistics_ptr + (samples + sample) * G + group, rstd, mask=leads)

    centre = mean - added
    scale = rstd * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = y_ptr + sample * V * C
    if HELD:
        z = (x - centre[None, :]) * scale[None, :] + bias[None, :]
        offset = voxel[:, None] * C + column[None, :]
        tl.store(y + offset, activated(z, SILU).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        for start in tl.range(0, V, BLOCK_V, num_stages=STAGES):
            voxel, mask = _tile(start, V, inside, BLOCK_V)
            x = _load(first_ptr, second_ptr, voxel, column, mask, sample, V, C, SPLIT, PAIR)
            z = (x - centre[None, :]) * scale[None, :] + bias[None, :]
            offset = voxel[:, None] * C + column[None, :]
            tl.store(y + offset, activated(z, SILU).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _normal_and_dz(
    dy_ptr, first_ptr, second_ptr, centre, rstd, weight, bias, voxel, column, mask, sample, V, C, SPLIT,
    PAIR: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Return the standardised x of a tile (0 where no element exists) and the gradient in front of the activation."""
    x = _load(first_ptr, second_ptr, voxel, column, mask, sample, V, C, SPLIT, PAIR)
    normal = tl.where(mask, (x - centre[None, :]) * rstd[None, :], 0.0)
    own_dy = dy_ptr + sample * V * C
    dy = tl.load(own_dy + voxel[:, None] * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return normal, before_activation(dy, normal * weight[None, :] + bias[None, :], SILU)


@triton.jit
def _with_kept(
    dx, kept_first_ptr, kept_second_ptr, voxel, column, mask, sample, V, C, SPLIT,
    KEPT_FIRST: tl.constexpr, KEPT_SECOND: tl.constexpr,
):  # fmt: skip
    """Return ``dx`` plus the gradients of the returned inputs (``keep``)."""
    if KEPT_FIRST:
        first, offset = kept_first_ptr + sample * V * SPLIT, voxel[:, None] * SPLIT + column[None, :]
        dx += tl.load(first + offset, mask=mask & (column < SPLIT)[None, :], other=0.0).to(tl.float32)
    if KEPT_SECOND:
        second = kept_second_ptr + sample * V * (C - SPLIT)
        offset = voxel[:, None] * (C - SPLIT) + (column - SPLIT)[None, :]
        dx += tl.load(second + offset, mask=mask & (column >= SPLIT)[None, :], other=0.0).to(tl.float32)
    return dx


@triton.jit
def group_norm_slab_backward_kernel(
    dy_ptr,  # (N, V, C)
    kept_first_ptr, kept_second_ptr,  # shapes of the inputs, read if KEPT_FIRST, KEPT_SECOND: added to their gradients
    first_ptr, second_ptr,  # (N, V, SPLIT), and (N, V, C - SPLIT) if PAIR
    added_ptr,  # (N, C) if ADDED
    weight_ptr, bias_ptr,  # (C,)
    statistics_ptr,  # (2, N, G) fp32
    dx_first_ptr, dx_second_ptr,  # shapes of the inputs
    d_added_ptr,  # (N, C), written if ADDED
    sums_ptr,  # (N, 2, C) fp32: sums of dz and of dz * normal
    V, C, SPLIT,
    KEPT_FIRST: tl.constexpr, KEPT_SECOND: tl.constexpr,
    PAIR: tl.constexpr, ADDED: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of inputs and ``added``, and those of the parameters per sample. Grid as in forward."""
    sample, samples, G = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.num_programs(0) * GROUPS
    column, inside, group = _own_columns(WIDTH, GROUPS, BLOCK_C)
    centre, rstd = load_statistics(statistics_ptr, added_ptr, column, inside, sample, samples, C, G, WIDTH, ADDED)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HELD:
        voxel, mask = _tile(0, V, inside, BLOCK_V)
        normal, dz = _normal_and_dz(
            dy_ptr, first_ptr, second_ptr, centre, rstd, weight, bias, voxel, column, mask, sample, V, C, SPLIT,
            PAIR, SILU,
        )  # fmt: skip
        total = tl.sum(dz, 0)
        product = tl.sum(dz * normal, 0)
        normals = tl.sum(normal, 0)
    else:
        totals = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
        products = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
        all_normals = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
        for start in tl.range(0, V, BLOCK_V, num_stages=STAGES):
            voxel, mask = _tile(start, V, inside, BLOCK_V)
            normal, dz = _normal_and_dz(
                dy_ptr, first_ptr, second_ptr, centre, rstd, weight, bias, voxel, column, mask, sample, V, C, SPLIT,
                PAIR, SILU,
            )  # fmt: skip
            totals += dz
            products += dz * normal
            if ADDED:
                all_normals += normal
        total = tl.sum(totals, 0)
        product = tl.sum(products, 0)
        normals = tl.sum(all_normals, 0)
    own = sums_ptr + sample * 2 * C + column
    tl.store(own, total, mask=inside)
    tl.store(own + C, product, mask=inside)
    constant = _over_group(weight * total, group, inside, GROUPS) / (V * WIDTH)
    slope = _over_group(weight * product, group, inside, GROUPS) / (V * WIDTH)
    if ADDED:
        d_added = rstd * (weight * total - constant * V - slope * normals)
        tl.store(d_added_ptr + sample * C + column, d_added.to(d_added_ptr.dtype.element_ty), mask=inside)
    if HELD:
        dx = rstd[None, :] * (dz * weight[None, :] - constant[None, :] - normal * slope[None, :])
        dx = _with_kept(
            dx, kept_first_ptr, kept_second_ptr, voxel, column, mask, sample, V, C, SPLIT, KEPT_FIRST, KEPT_SECOND
        )
        _store(dx_first_ptr, dx_second_ptr, dx, voxel, column, mask, sample, V, C, SPLIT, PAIR)
    else:
        for start in tl.range(0, V, BLOCK_V, num_stages=STAGES):
            voxel, mask = _tile(start, V, inside, BLOCK_V)
            normal, dz = _normal_and_dz(
                dy_ptr, first_ptr, second_ptr, centre, rstd, weight, bias, voxel, column, mask, sample, V, C, SPLIT,
                PAIR, SILU,
            )  # fmt: skip
            dx = rstd[None, :] * (dz * weight[None, :] - constant[None, :] - normal * slope[None, :])
            dx = _with_kept(
                dx, kept_first_ptr, kept_second_ptr, voxel, column, mask, sample, V, C, SPLIT, KEPT_FIRST, KEPT_SECOND
            )
            _store(dx_first_ptr, dx_second_ptr, dx, voxel, column, mask, sample, V, C, SPLIT, PAIR)
