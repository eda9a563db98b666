"""Residual addition and a norm of each row, optionally in FP8: RMSNorm, and LayerNorm with weights centred on zero.

RMSNorm: ``x = residual + delta``, ``y = weight x / sqrt(mean(x^2) + epsilon)`` (Zhang, Sennrich, arXiv:1910.07467,
section 3). LayerNorm 1p, Megatron-LM's name for a layer norm whose weights start at zero and decay towards it: ``x =
residual + delta + added``, ``y = (x - mean(x)) / sqrt(variance(x) + epsilon) (1 + weight) + bias`` (Ba, Kiros, Hinton,
arXiv:1607.06450). ``added`` is the bias of the product that computed ``delta``.

The functions work without autograd. The caller keeps ``x`` and ``moments``, from which backward and ``recompute``
compute their results; y is not kept. A separate function computes the gradients of the parameters, because frozen
parameters have none. FP8 results are rounded directly from fp32, with a delayed scale (:mod:`common.ops.fp8_cast`).
:mod:`common.ops.add_layer_norm` is a pre-norm with autograd and weights around one, for narrower rows.

The functions compute LayerNorm 1p if there is a bias, or a second moment of each row, and otherwise RMSNorm.
Shapes: T tokens, E features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling, computed_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


class Normed(NamedTuple):
    """Result of the forward pass.

    Attributes:
        residual: (T, E), the sum, in the dtype of the residual; the residual itself if nothing was added.
        moments: fp32, or fp64 for fp64 inputs. RMSNorm: (T,), 1 / sqrt(mean(x^2) + epsilon) of each row. LayerNorm:
            (2, T), mean and 1 / sqrt(variance + epsilon).
        y: (T, E), dtype of the residual; None if not requested.
        y8: (T, E), e4m3; None if not requested.
    """

    residual: Tensor
    moments: Tensor
    y: Tensor | None
    y8: Fp8Tensor | None


class RowNorm(NamedTuple):
    """Functions of an implementation.

    See :func:`forward_reference`, :func:`backward_reference`, :func:`recompute_reference` and
    :func:`parameter_gradients_reference`.
    """

    forward: Callable[..., Normed]
    backward: Callable[..., tuple[Tensor, Fp8Tensor | None]]
    recompute: Callable[..., Tensor]
    parameter_gradients: Callable[..., tuple[Tensor, ...]]


@torch.no_grad()
def forward_reference(
    residual_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
    epsilon: float,
    bias_E: Tensor | None = None,
    added_E: Tensor | None = None,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Normed:
    """Add to the residual and normalise the sum.

    Args:
        residual_TE: contiguous.
        delta_TE: added to the residual; None for nothing; contiguous.
        weight_E: weight of the norm; the scale of LayerNorm is ``1 + weight_E``.
        epsilon: added to the mean square, or to the variance.
        bias_E: bias of LayerNorm; None for RMSNorm.
        added_E: added to every row (the bias of the product that computed ``delta_TE``); None for nothing.
        half: whether y is requested.
        fp8: scale of y in e4m3; None for no FP8. With ``half``, FP8 is rounded from the rounded y, as a cast of y
            would be.
        frozen_scales: leave the scale as it is.
    """
    # the sum is rounded to the dtype of the residual before the norm
    x_TE = residual_TE
    given = [widen(each) for each in (delta_TE, added_E) if each is not None]
    if given:
        x_TE = (widen(residual_TE) + sum(given)).to(residual_TE.dtype)
    widened_TE = widen(x_TE)
    if bias_E is None:
        moments = (widened_TE.square().mean(1) + epsilon).rsqrt()
    else:
        mean_T = widened_TE.mean(1)
        rstd_T = ((widened_TE - mean_T.unsqueeze(1)).square().mean(1) + epsilon).rsqrt()
        moments = torch.stack([mean_T, rstd_T])
    y_TE = _scaled(x_TE, moments, weight_E, bias_E)
    if half:
        y_TE = y_TE.to(x_TE.dtype)
    y8 = None if fp8 is None else computed_reference(widen(y_TE), fp8, E4M3, x_TE.dtype, frozen_scales)
    return Normed(x_TE, moments, y_TE if half else None, y8)


@torch.no_grad()
def backward_reference(
    dy_TE: Tensor,
    residual_TE: Tensor,
    moments: Tensor,
    weight_E: Tensor,
    d_residual_TE: Tensor | None = None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor, Fp8Tensor | None]:
    """Return the gradient of the sum, (T, E), in the dtype of ``dy_TE`` and in FP8; FP8 is None if not requested.

    It is also the gradient of the residual and of the tensors that were added to it. With n the normalised row:
    RMSNorm has g = dy weight and dx = (g - n mean(g n)) / rms; LayerNorm has g = dy (1 + weight) and dx = (g - mean(g)
    - n mean(g n)) / deviation.

    Args:
        dy_TE: gradient of y; contiguous.
        residual_TE, moments: results of the forward pass, see :class:`Normed`.
        d_residual_TE: gradient of the sum from its other consumers, which is added; None for none; contiguous.
        fp8: scale of the result in e5m2; None for no FP8.
        frozen_scales: leave the scale as it is.
    """
    normal_TE, dy_widened_TE, widened_E = _normal(residual_TE, moments), widen(dy_TE), widen(weight_E)
    if moments.dim() == 1:
        g_TE = dy_widened_TE * widened_E
        dx_TE = (g_TE - normal_TE * (g_TE * normal_TE).mean(1, keepdim=True)) * moments.unsqueeze(1)
    else:
        g_TE = dy_widened_TE * (1 + widened_E)
        centred_TE = g_TE - g_TE.mean(1, keepdim=True)
        dx_TE = (centred_TE - normal_TE * (g_TE * normal_TE).mean(1, keepdim=True)) * moments[1].unsqueeze(1)
    if d_residual_TE is not None:
        dx_TE = dx_TE + widen(d_residual_TE)
    dx8 = None if fp8 is None else computed_reference(dx_TE, fp8, E5M2, dy_TE.dtype, frozen_scales)
    return dx_TE.to(dy_TE.dtype), dx8


@torch.no_grad()
def recompute_reference(residual_TE: Tensor, moments: Tensor, weight_E: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Return y, (T, E), recomputed from the sum and the moments of :class:`Normed`."""
    return _scaled(residual_TE, moments, weight_E, bias_E).to(residual_TE.dtype)


@torch.no_grad()
def parameter_gradients_reference(
    dy_TE: Tensor, residual_TE: Tensor, moments: Tensor, dx_TE: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of weight, bias (LayerNorm) and ``added_E``, (E,) each, fp32, or fp64 for fp64 inputs.

    Args:
        dy_TE: gradient of y; contiguous.
        residual_TE, moments: results of the forward pass, see :class:`Normed`.
        dx_TE: result of the backward pass, for the gradient of ``added_E``; contiguous. None if there is no
            ``added_E``.
    """
    of_weight_E = (widen(dy_TE) * _normal(residual_TE, moments)).sum(0)
    summed = (dy_TE if moments.dim() == 2 else None, dx_TE)
    return of_weight_E, *(widen(each).sum(0) for each in summed if each is not None)


def _normal(x_TE: Tensor, moments: Tensor) -> Tensor:
    if moments.dim() == 1:
        return widen(x_TE) * moments.unsqueeze(1)
    return (widen(x_TE) - moments[0].unsqueeze(1)) * moments[1].unsqueeze(1)


def _scaled(x_TE: Tensor, moments: Tensor, weight_E: Tensor, bias_E: Tensor | None) -> Tensor:
    normal_TE = _normal(x_TE, moments)
    if bias_E is None:
        return normal_TE * widen(weight_E)
    return normal_TE * (1 + widen(weight_E)) + widen(bias_E)


REFERENCE = RowNorm(forward_reference, backward_reference, recompute_reference, parameter_gradients_reference)


MOST_FEATURES = 16384
"""Largest number of features, because a program of the Triton kernels holds a whole row."""

FAST = {"triton": triton_kernels("common.ops.row_norm.triton", most={"features": MOST_FEATURES})}
KERNEL_NAMES = (("RMSNorm or layer norm", r"^row_norm_"),)

RMS_NORM = Operation("rms_norm", REFERENCE, FAST, kernel_names=KERNEL_NAMES, cases="common.ops.row_norm.cases:RMS_NORM")
"""Functions: :class:`RowNorm`. Size of a request: ``features``."""

LAYER_NORM_1P = Operation(
    "layer_norm_1p", REFERENCE, FAST, kernel_names=KERNEL_NAMES, cases="common.ops.row_norm.cases:LAYER_NORM_1P"
)
"""Functions and sizes are those of :data:`RMS_NORM`."""
