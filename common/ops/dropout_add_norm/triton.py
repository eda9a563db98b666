"""Launches and autograd function of the kernels of :mod:`common.ops.dropout_add_norm.kernels`. Shapes as there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.dropout.reference import DropoutMask
from common.ops.dropout.triton import Rate, rate
from common.ops.dropout_add_norm import kernels
from common.ops.fp8_cast.reference import E4M3, E5M2, SAMPLED_ROWS_OF_COMPUTED, Fp8Tensor, Handover, Scaling
from common.ops.fp8_cast.triton import fields_for_autograd, output
from common.ops.tile import Tile
from common.ops.tiling import sums_by_dtype
from common.ops.triton_support import programs_for, require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(rows=4, warps=4, programs=0),
    "backward": Tile(rows=2, warps=4, programs=4),
    "forward to fp8": Tile(rows=1, warps=4, programs=8),
    "backward to fp8": Tile(rows=1, warps=4, programs=5),
}
"""Tiles by pass."""


class NormCall(NamedTuple):
    """Numbers that forward and backward of one call share."""

    rate: Rate
    site: int


def _tile(name: str, fp8: Scaling | None) -> Tile:
    return TILES[name if fp8 is None else f"{name} to fp8"]


def _programs(tile: Tile, x_TE: Tensor) -> int:
    return programs_for(triton.cdiv(x_TE.shape[0], tile.rows), tile.programs, x_TE.device)


def _constants(
    x_TE: Tensor, bias_E: Tensor | None, residual_TE: Tensor | None, call: NormCall, tile: Tile
) -> dict[str, Any]:
    features = x_TE.shape[1]
    return {
        "E": features,
        "BIAS": bias_E is not None,
        "RESIDUAL": residual_TE is not None,
        **call.rate._asdict(),
        "ROWS": tile.rows,
        "BLOCK_E": triton.next_power_of_2(features),
        "num_warps": tile.warps,
    }


def _fp8_constants(x_TE: Tensor) -> dict[str, int]:
    return {"SAMPLED_ROWS": SAMPLED_ROWS_OF_COMPUTED, "GROUP": min(8, triton.next_power_of_2(x_TE.shape[1]))}


def forward(
    x_TE: Tensor,
    bias_E: Tensor | None,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    norm_bias_E: Tensor,
    epsilon: float,
    seed: Tensor,
    call: NormCall,
    fp8: Scaling | None = None,
) -> tuple[Tensor, Fp8Tensor | None, Tensor]:
    """Return y (T, E), y in e4m3 or None, and mean and 1 / standard deviation of each row, fp32 (2, T).

    ``source`` of the FP8 tensor is y.
    """
    require_contiguous(bias=bias_E, weight=weight_E, norm_bias=norm_bias_E)
    tokens, features = x_TE.shape
    tile = _tile("forward", fp8)
    grid, constants = (_programs(tile, x_TE),), _constants(x_TE, bias_E, residual_TE, call, tile)
    y = output(x_TE, features, E4M3, fp8, half=True)
    moments_2T = x_TE.new_empty((2, tokens), dtype=torch.float32)
    given = (x_TE, bias_E, residual_TE, weight_E, norm_bias_E, seed, y.half)
    y_TE, y8 = y.half, y.fp8(x_TE.dtype)
    assert y_TE is not None
    if y8 is None:
        kernels.dropout_add_norm_forward_kernel[grid](*given, moments_2T, tokens, call.site, epsilon, **constants)
        return y_TE, None, moments_2T
    kernels.dropout_add_norm_forward_to_fp8_kernel[grid](
        *given, *y.pointers(), moments_2T, tokens, call.site, epsilon, **_fp8_constants(x_TE), **constants
    )
    return y_TE, replace(y8, source=y_TE), moments_2T


def backward(
    dy_TE: Tensor,
    other_dy_TE: Tensor | None,
    x_TE: Tensor,
    bias_E: Tensor | None,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    moments_2T: Tensor,
    seed: Tensor,
    call: NormCall,
    fp8: Scaling | None = None,
) -> tuple[Tensor | Fp8Tensor, Tensor | None, Tensor]:
    """Compute the gradients of x and of the residual, and partial sums for those of the parameters.

    Args:
        dy_TE, other_dy_TE: gradients from two consumers of the result; the second may be None.
        fp8: scale of dx in e5m2; None for dx in the dtype of x.

    Returns:
        dx (T, E); the gradient of the residual, or None; partial gradients of the parameters, fp32 (programs, K * E):
        K = 2 for weight and bias of LayerNorm, or 3 with the bias of x.
    """
    tokens, features = x_TE.shape
    tile = _tile("backward", fp8)
    programs = _programs(tile, x_TE)
    dx = output(x_TE, features, E5M2, fp8, half=fp8 is None)
    d_residual_TE = None if residual_TE is None else torch.empty_like(residual_TE)
    partial = moments_2T.new_empty((programs, (2 if bias_E is None else 3) * features))
    kernels.dropout_add_norm_backward_kernel[(programs,)](
        dy_TE, other_dy_TE, x_TE, bias_E, residual_TE, weight_E, seed, moments_2T, dx.half, *dx.pointers(),
        d_residual_TE, partial, tokens, call.site, TWO=other_dy_TE is not None, FP8=fp8 is not None,
        **_fp8_constants(x_TE), **_constants(x_TE, bias_E, residual_TE, call, tile),
    )  # fmt: skip
    found = dx.fp8(x_TE.dtype) or dx.half
    assert found is not None
    return found, d_residual_TE, partial


class _DropoutAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor, bias_E: Tensor | None, residual_TE: Tensor | None, weight_E: Tensor, norm_bias_E: Tensor,
        epsilon: float, seed: Tensor, call: NormCall, fp8: Scaling | None, handover: Handover | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x_TE = x_TE.contiguous()
        residual_TE = None if residual_TE is None else residual_TE.contiguous()
        y_TE, y8, moments_2T = forward(x_TE, bias_E, residual_TE, weight_E, norm_bias_E, epsilon, seed, call, fp8)
        ctx.save_for_backward(x_TE, bias_E, residual_TE, weight_E, moments_2T, seed)
        ctx.call, ctx.norm_bias_dtype, ctx.handover = call, norm_bias_E.dtype, handover
        ctx.set_materialize_grads(False)
        # a view: if both results were the same tensor, autograd would add their gradients before backward
        second_TE = y_TE.view_as(y_TE)
        return (y_TE, second_TE) if y8 is None else (*fields_for_autograd(ctx, y8), second_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, bias_E, residual_TE, weight_E, moments_2T, seed = ctx.saved_tensors
        given = [gradient.contiguous() for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 10
        dy_TE, other_dy_TE = given if len(given) == 2 else (given[0], None)
        fp8 = None if ctx.handover is None else ctx.handover.scaling
        dx, d_residual_TE, partial = backward(
            dy_TE, other_dy_TE, x_TE, bias_E, residual_TE, weight_E, moments_2T, seed, ctx.call, fp8
        )
        dx_TE = ctx.handover.leave(dx) if isinstance(dx, Fp8Tensor) else dx
        dtypes = [weight_E.dtype, ctx.norm_bias_dtype] + ([] if bias_E is None else [bias_E.dtype])
        d_weight, d_norm_bias, *d_bias = sums_by_dtype(partial, dtypes)
        return dx_TE, d_bias[0] if d_bias else None, d_residual_TE, d_weight, d_norm_bias, *(None,) * 5


def dropout_add_norm(
    x_TE: Tensor,
    bias_E: Tensor | None,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    norm_bias_E: Tensor,
    epsilon: float,
    dropout: DropoutMask,
    twice: bool = False,
    *,
    fp8: Scaling | None = None,
    handover: Handover | None = None,
) -> Tensor | Fp8Tensor | tuple[Tensor | Fp8Tensor, Tensor]:
    """Return ``LayerNorm(residual + dropout(x + bias))``, (T, E), in FP8 if ``fp8``; a pair if ``twice``.

    See :func:`common.ops.dropout_add_norm.dropout_add_norm_reference`. Without FP8 both results share memory. The
    backward kernel adds their gradients.
    """
    call = NormCall(rate(dropout.p), dropout.site)
    second: Tensor
    *results, second = _DropoutAddNorm.apply(
        x_TE, bias_E, residual_TE, weight_E, norm_bias_E, epsilon, dropout.seed, call, fp8, handover
    )
    first: Tensor | Fp8Tensor = results[0] if fp8 is None else Fp8Tensor(*results)
    return (first, second) if twice else first
