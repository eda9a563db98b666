"""The reference of :mod:`common.ops.layer_norm_1p`. Shapes: T tokens, E features."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling, computed_reference
from common.ops.triton_support import widen


class Normed(NamedTuple):
    """What forward gives.

    Attributes:
        residual: (T, E), the sum, in the dtype of the residual; the residual itself where nothing was added.
        moments: (2, T), mean and 1 / sqrt(variance + epsilon) of each row, fp32, or fp64 of fp64.
        y: (T, E), dtype of the residual; None where it was not wanted.
        y8: (T, E), e4m3; None where it was not wanted.
    """

    residual: Tensor
    moments: Tensor
    y: Tensor | None
    y8: Fp8Tensor | None


class ParameterGradients(NamedTuple):
    """Gradients of what is added to or multiplied with every row, (E,) each, fp32, or fp64 of fp64.

    Attributes:
        weight, bias: of the norm.
        added: of the bias of the product before; None where the gradient of its result was not given.
    """

    weight: Tensor
    bias: Tensor
    added: Tensor | None


class LayerNorm1p(NamedTuple):
    """The functions of an implementation.

    See :func:`forward_reference`, :func:`backward_reference`, :func:`recompute_reference` and
    :func:`parameter_gradients_reference`.
    """

    forward: Callable[..., Normed]
    backward: Callable[..., tuple[Tensor, Fp8Tensor | None]]
    recompute: Callable[..., Tensor]
    parameter_gradients: Callable[..., ParameterGradients]


@torch.no_grad()
def forward_reference(
    residual_TE: Tensor,
    delta_TE: Tensor | None,
    added_E: Tensor | None,
    weight_E: Tensor,
    bias_E: Tensor,
    epsilon: float,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Normed:
    """Reference implementation.

    Args:
        residual_TE: contiguous.
        delta_TE: added to it, or None for nothing; contiguous. The sum is rounded to the dtype of the residual first.
        added_E: added to every row, the bias of the product that made ``delta_TE``, or None for nothing.
        weight_E, bias_E: of the norm; the scale is ``1 + weight_E``.
        epsilon: added to the variance.
        half: whether y is wanted.
        fp8: scale of y in e4m3, if that is wanted; where ``half`` is wanted too it is of the rounded y, so that a cast
            of that gives the same.
        frozen_scales: leave the scale as it is.
    """
    x_TE = residual_TE
    given = [widen(each) for each in (delta_TE, added_E) if each is not None]
    if given:
        x_TE = (widen(residual_TE) + sum(given)).to(residual_TE.dtype)
    wide_TE = widen(x_TE)
    mean_T = wide_TE.mean(1)
    rstd_T = ((wide_TE - mean_T.unsqueeze(1)).square().mean(1) + epsilon).rsqrt()
    moments_2T = torch.stack([mean_T, rstd_T])
    y_TE = _scaled(_normal(x_TE, moments_2T), weight_E, bias_E)
    if half:
        y_TE = y_TE.to(x_TE.dtype)
    y8 = None if fp8 is None else computed_reference(widen(y_TE), fp8, E4M3, x_TE.dtype, frozen_scales)
    return Normed(x_TE, moments_2T, y_TE if half else None, y8)


@torch.no_grad()
def backward_reference(
    dy_TE: Tensor,
    residual_TE: Tensor,
    moments_2T: Tensor,
    weight_E: Tensor,
    d_residual_TE: Tensor | None = None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor, Fp8Tensor | None]:
    """Reference implementation.

    With n the normalised row and g = dy (1 + weight): dx = (g - mean(g) - n mean(g n)) / deviation.

    Args:
        dy_TE: gradient of y; contiguous.
        residual_TE, moments_2T: of :class:`Normed`.
        weight_E: of the norm.
        d_residual_TE: gradient of the sum by its other readers, or None; contiguous.
        fp8: scale of the result in e5m2, if that is wanted.
        frozen_scales: leave the scale as it is.

    Returns:
        Gradient of the sum, and so of the residual and of what was added to it: (T, E), dtype of ``dy_TE``, and in FP8.
    """
    normal_TE = _normal(residual_TE, moments_2T)
    d_normal_TE = widen(dy_TE) * (1 + widen(weight_E))
    along_T1 = (d_normal_TE * normal_TE).mean(1, keepdim=True)
    dx_TE = (d_normal_TE - d_normal_TE.mean(1, keepdim=True) - normal_TE * along_T1) * moments_2T[1].unsqueeze(1)
    if d_residual_TE is not None:
        dx_TE = dx_TE + widen(d_residual_TE)
    dx8 = None if fp8 is None else computed_reference(dx_TE, fp8, E5M2, dy_TE.dtype, frozen_scales)
    return dx_TE.to(dy_TE.dtype), dx8


@torch.no_grad()
def recompute_reference(residual_TE: Tensor, moments_2T: Tensor, weight_E: Tensor, bias_E: Tensor) -> Tensor:
    """Recompute y, (T, E).

    Args:
        residual_TE, moments_2T: of :class:`Normed`.
        weight_E, bias_E: of the norm.
    """
    return _scaled(_normal(residual_TE, moments_2T), weight_E, bias_E).to(residual_TE.dtype)


@torch.no_grad()
def parameter_gradients_reference(
    dy_TE: Tensor, residual_TE: Tensor, moments_2T: Tensor, dx_TE: Tensor | None = None
) -> ParameterGradients:
    """Reference implementation.

    Args:
        dy_TE: gradient of y; contiguous.
        residual_TE, moments_2T: of :class:`Normed`.
        dx_TE: what backward gave, for the gradient of what was added to every row; contiguous. None where nothing was.
    """
    dy_wide_TE = widen(dy_TE)
    of_weight_E = (dy_wide_TE * _normal(residual_TE, moments_2T)).sum(0)
    return ParameterGradients(of_weight_E, dy_wide_TE.sum(0), None if dx_TE is None else widen(dx_TE).sum(0))


def _normal(x_TE: Tensor, moments_2T: Tensor) -> Tensor:
    return (widen(x_TE) - moments_2T[0].unsqueeze(1)) * moments_2T[1].unsqueeze(1)


def _scaled(normal_TE: Tensor, weight_E: Tensor, bias_E: Tensor) -> Tensor:
    return normal_TE * (1 + widen(weight_E)) + widen(bias_E)
