# mypy: allow-untyped-defs
"""Triton kernels of the outer product mean, beside products of the library.

Shapes: B samples, S sequences, I J or M N residues, C channels of a and of b, F = C C, Z channels of a pair, P pairs.

A library's product over the sequences has the layout (I, C, J, C), but the projection sums over both C. The kernels
write and read the outer products as (I, J, C, C) instead, so that no pass reorders them; at 256 residues and 32
channels these are 134 MB in 16 bits. The projection, its gradient and that of its weight are products of the library.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.bias_gradient.triton import row_sums
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous


@triton.jit
def outer_product_kernel(
    a_ptr,  # (B, S, M, C)
    b_ptr,  # (B, S, N, C)
    outer_ptr,  # (B, M, N, C, C)
    S, M, N, a_b, a_s, a_m, b_b, b_s, b_n,
    C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the outer products of BLOCK_M channels of a and BLOCK_N of b. Grid (blocks of M C, blocks of N C, B)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sample = tl.program_id(2).to(tl.int64)
    a_ptr += sample * a_b + (row // C * a_m + row % C)[:, None]
    b_ptr += sample * b_b + (column // C * b_n + column % C)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, S, BLOCK_K):
        s = first + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + s[None, :] * a_s, mask=(row < M * C)[:, None] & (s < S)[None, :], other=0.0)
        b = tl.load(b_ptr + s[:, None] * b_s, mask=(s < S)[:, None] & (column < N * C)[None, :], other=0.0)
        total = tl.dot(a, b, total)
    at = ((sample * M + row // C) * N * (C * C) + row % C * C)[:, None] + (column // C * (C * C) + column % C)[None, :]
    inside = (row < M * C)[:, None] & (column < N * C)[None, :]
    tl.store(outer_ptr + at, total.to(outer_ptr.dtype.element_ty), mask=inside)


@triton.jit
def outer_product_gradient_kernel(
    d_outer_ptr,  # (B, I, J, C, C); one of I and J is M, the other one N
    other_ptr,  # (B, S, N, C): the factor without this gradient
    result_ptr,  # (B, S, M, C), contiguous
    S, M, N, d_b, d_m, d_n, other_b, other_s, other_n,
    C: tl.constexpr, M_CHANNEL: tl.constexpr, N_CHANNEL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the gradient of BLOCK_M channels of a factor for BLOCK_S sequences. Grid (blocks of M C, blocks of S, B).

    ``d_m``, ``M_CHANNEL``, ``d_n`` and ``N_CHANNEL`` are the strides of the gradient of the outer products from one
    residue or channel to the next, of this factor and of the other one.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    sample = tl.program_id(2).to(tl.int64)
    d_outer_ptr += sample * d_b + ((row // C).to(tl.int64) * d_m + row % C * M_CHANNEL)[:, None]
    other_ptr += sample * other_b + (s * other_s)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_S), tl.float32)
    for first in range(0, N * C, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        d_mask = (row < M * C)[:, None] & (k < N * C)[None, :]
        d_outer = tl.load(
            d_outer_ptr + ((k // C).to(tl.int64) * d_n + k % C * N_CHANNEL)[None, :], mask=d_mask, other=0.0
        )
        mask = (k < N * C)[:, None] & (s < S)[None, :]
        other = tl.load(other_ptr + (k // C * other_n + k % C)[:, None], mask=mask, other=0.0)
        total = tl.dot(d_outer, other, total)
    at = (sample * S + s)[None, :] * (M * C) + row[:, None]
    tl.store(result_ptr + at, total.to(result_ptr.dtype.element_ty), mask=(row < M * C)[:, None] & (s < S)[None, :])


@triton.jit
def outer_product_scale_kernel(
    x_ptr,  # (P, Z)
    norm_ptr,  # (P,)
    residual_ptr, bias_ptr,  # (P, Z) and (Z,), or both None
    result_ptr,  # (P, Z)
    P,
    Z: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Write ``residual + (x + bias) / norm``, or ``x / norm``. Grid (ceil(P / BLOCK_P),)."""
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.arange(0, BLOCK_Z)
    mask = (pair < P)[:, None] & (channel < Z)[None, :]
    at = pair.to(tl.int64)[:, None] * Z + channel[None, :]
    inverse = 1.0 / tl.load(norm_ptr + pair, mask=pair < P, other=1.0).to(tl.float32)
    value = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        value += tl.load(bias_ptr + channel, mask=channel < Z, other=0.0).to(tl.float32)[None, :]
    value *= inverse[:, None]
    if residual_ptr is not None:
        value += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(result_ptr + at, value.to(result_ptr.dtype.element_ty), mask=mask)


TILES: dict[str, Tile] = {
    "outer": Tile(rows=128, columns=128, depth=64, warps=8, stages=2),
    "gradient": Tile(rows=128, columns=64, depth=64, warps=8, stages=3),
    "scale": Tile(elements=4096, warps=4),
}
"""Tiles by kernel. ``rows`` are channels of the residues of one factor; ``columns`` of the other, or sequences."""


def outer_products(a_BSIC: Tensor, b_BSJC: Tensor) -> Tensor:
    """Return the sums over the sequences of outer products, (B, I, J, C, C). One launch.

    Raises:
        ValueError: channels of a residue are not contiguous.
    """
    for name, factor in (("a", a_BSIC), ("b", b_BSJC)):
        if factor.stride(3) != 1:
            raise ValueError(f"channels of {name} must be contiguous, not with strides {factor.stride()}")
    samples, sequences, i, channels = a_BSIC.shape
    j, tile = b_BSJC.shape[2], TILES["outer"]
    outer = a_BSIC.new_empty(samples, i, j, channels, channels)
    grid = triton.cdiv(i * channels, tile.rows), triton.cdiv(j * channels, tile.columns), samples
    outer_product_kernel[grid](
        a_BSIC, b_BSJC, outer, sequences, i, j, *a_BSIC.stride()[:3], *b_BSJC.stride()[:3], C=channels,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return outer


def factor_gradient(d_outer: Tensor, other_BSNC: Tensor, *, of_a: bool) -> Tensor:
    """Return the gradient of a, or of b, contiguous. One launch.

    Args:
        d_outer: gradient of the outer products, (B, I, J, C, C), contiguous.
        other_BSNC: b for the gradient of a, and a for that of b.
    """
    samples, sequences, n, channels = other_BSNC.shape
    own, tile = d_outer.shape[1 if of_a else 2], TILES["gradient"]
    d_b, d_i, d_j, d_c, d_d = d_outer.stride()
    d_m, d_n, m_channel, n_channel = (d_i, d_j, d_c, d_d) if of_a else (d_j, d_i, d_d, d_c)
    result = other_BSNC.new_empty(samples, sequences, own, channels)
    grid = triton.cdiv(own * channels, tile.rows), triton.cdiv(sequences, tile.columns), samples
    outer_product_gradient_kernel[grid](
        d_outer, other_BSNC, result, sequences, own, n, d_b, d_m, d_n, *other_BSNC.stride()[:3], C=channels,
        M_CHANNEL=m_channel, N_CHANNEL=n_channel, BLOCK_M=tile.rows, BLOCK_S=tile.columns, BLOCK_K=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return result


def scaled(x_PZ: Tensor, norm_P: Tensor, residual_PZ: Tensor | None = None, bias_Z: Tensor | None = None) -> Tensor:
    """Return ``residual + (x + bias) / norm``, or ``x / norm`` without both. One launch."""
    pairs, features = x_PZ.shape
    tile, block = TILES["scale"], triton.next_power_of_2(features)
    held = max(1, tile.elements // block)
    result_PZ = torch.empty_like(x_PZ)
    outer_product_scale_kernel[(triton.cdiv(pairs, held),)](
        x_PZ, norm_P, residual_PZ, bias_Z, result_PZ, pairs, Z=features, BLOCK_P=held, BLOCK_Z=block,
        num_warps=tile.warps,
    )  # fmt: skip
    return result_PZ


class _OuterProductMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual_BIJZ: Tensor, a_BSIC: Tensor, b_BSJC: Tensor, norm_BIJ: Tensor, weight_ZF: Tensor, bias_Z: Tensor,
    ) -> Tensor:  # fmt: skip
        require_contiguous(residual=residual_BIJZ, norm=norm_BIJ, bias=bias_Z)
        outer = outer_products(a_BSIC, b_BSJC)
        ctx.save_for_backward(outer, a_BSIC, b_BSJC, norm_BIJ, weight_ZF)
        update_PZ = outer.view(-1, weight_ZF.shape[1]) @ weight_ZF.t()
        residual_PZ = residual_BIJZ.view(-1, len(weight_ZF))
        return scaled(update_PZ, norm_BIJ.view(-1), residual_PZ, bias_Z).view_as(residual_BIJZ)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        outer, a_BSIC, b_BSJC, norm_BIJ, weight_ZF = ctx.saved_tensors
        features, factors = weight_ZF.shape
        d_update_PZ = scaled(gradients[0].contiguous().view(-1, features), norm_BIJ.view(-1))
        d_weight_ZF = d_update_PZ.t() @ outer.view(-1, factors)
        d_outer = (d_update_PZ @ weight_ZF).view_as(outer)
        da_BSIC = factor_gradient(d_outer, b_BSJC, of_a=True)
        db_BSJC = factor_gradient(d_outer, a_BSIC, of_a=False)
        return gradients[0], da_BSIC, db_BSJC, None, d_weight_ZF, row_sums(d_update_PZ, weight_ZF.dtype)


def outer_product_mean(
    residual_BIJZ: Tensor, a_BSIC: Tensor, b_BSJC: Tensor, norm_BIJ: Tensor, weight_ZF: Tensor, bias_Z: Tensor
) -> Tensor:
    """Return the updated pairs, (B, I, J, Z).

    See :func:`benchmarks.openfold.ops.outer_product_mean.outer_product_mean_reference`. All tensors but the norm have
    one dtype of 16 bits. The outer products are kept for the backward pass.

    Raises:
        ValueError: residual, norm or bias are not contiguous, or the channels of a or b.
    """
    result: Tensor = _OuterProductMean.apply(residual_BIJZ, a_BSIC, b_BSJC, norm_BIJ, weight_ZF, bias_Z)
    return result
