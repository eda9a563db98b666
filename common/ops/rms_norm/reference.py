"""The reference of :mod:`common.ops.rms_norm`. Shapes: T tokens, E features."""

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
        inverse_rms: (T,) 1 / sqrt(mean(x^2) + epsilon), fp32, or fp64 of fp64.
        y: (T, E), dtype of the residual; None where it was not wanted.
        y8: (T, E), e4m3; None where it was not wanted.
    """

    residual: Tensor
    inverse_rms: Tensor
    y: Tensor | None
    y8: Fp8Tensor | None


class RmsNorm(NamedTuple):
    """The functions of an implementation.

    See :func:`forward_reference`, :func:`backward_reference`, :func:`recompute_reference` and
    :func:`weight_gradient_reference`.
    """

    forward: Callable[..., Normed]
    backward: Callable[..., tuple[Tensor, Fp8Tensor | None]]
    recompute: Callable[..., Tensor]
    weight_gradient: Callable[..., Tensor]


@torch.no_grad()
def forward_reference(
    residual_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
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
        weight_E: of the norm.
        epsilon: added to the mean square.
        half: whether y is wanted.
        fp8: scale of y in e4m3, if that is wanted; where ``half`` is wanted too it is of the rounded y, so that a cast
            of that gives the same.
        frozen_scales: leave the scale as it is.
    """
    x_TE = residual_TE if delta_TE is None else (widen(residual_TE) + widen(delta_TE)).to(residual_TE.dtype)
    wide_TE = widen(x_TE)
    inverse_rms_T = (wide_TE.square().mean(1) + epsilon).rsqrt()
    y_TE = _weighted(wide_TE, inverse_rms_T, weight_E)
    if half:
        y_TE = y_TE.to(x_TE.dtype)
    y8 = None if fp8 is None else computed_reference(widen(y_TE), fp8, E4M3, x_TE.dtype, frozen_scales)
    return Normed(x_TE, inverse_rms_T, y_TE if half else None, y8)


@torch.no_grad()
def backward_reference(
    dy_TE: Tensor,
    residual_TE: Tensor,
    inverse_rms_T: Tensor,
    weight_E: Tensor,
    d_residual_TE: Tensor | None = None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor, Fp8Tensor | None]:
    """Reference implementation.

    Args:
        dy_TE: gradient of y; contiguous.
        residual_TE, inverse_rms_T: of :class:`Normed`.
        weight_E: of the norm.
        d_residual_TE: gradient of the sum by its other readers, or None; contiguous.
        fp8: scale of the result in e5m2, if that is wanted.
        frozen_scales: leave the scale as it is.

    Returns:
        Gradient of the sum, and so of the residual and of what was added to it: (T, E), dtype of ``dy_TE``, and in FP8.
    """
    normal_TE = widen(residual_TE) * inverse_rms_T.unsqueeze(1)
    d_normal_TE = widen(dy_TE) * widen(weight_E)
    along_T1 = (d_normal_TE * normal_TE).mean(1, keepdim=True)
    dx_TE = (d_normal_TE - normal_TE * along_T1) * inverse_rms_T.unsqueeze(1)
    if d_residual_TE is not None:
        dx_TE = dx_TE + widen(d_residual_TE)
    dx8 = None if fp8 is None else computed_reference(dx_TE, fp8, E5M2, dy_TE.dtype, frozen_scales)
    return dx_TE.to(dy_TE.dtype), dx8


@torch.no_grad()
def recompute_reference(residual_TE: Tensor, inverse_rms_T: Tensor, weight_E: Tensor) -> Tensor:
    """Recompute y, (T, E).

    Args:
        residual_TE, inverse_rms_T: of :class:`Normed`.
        weight_E: of the norm.
    """
    return _weighted(widen(residual_TE), inverse_rms_T, weight_E).to(residual_TE.dtype)


@torch.no_grad()
def weight_gradient_reference(dy_TE: Tensor, residual_TE: Tensor, inverse_rms_T: Tensor) -> Tensor:
    """Gradient of the weight, (E,) fp32, or fp64 of fp64.

    Args:
        dy_TE: gradient of y; contiguous.
        residual_TE, inverse_rms_T: of :class:`Normed`.
    """
    return (widen(dy_TE) * widen(residual_TE) * inverse_rms_T.unsqueeze(1)).sum(0)


def _weighted(wide_TE: Tensor, inverse_rms_T: Tensor, weight_E: Tensor) -> Tensor:
    return wide_TE * inverse_rms_T.unsqueeze(1) * widen(weight_E)
