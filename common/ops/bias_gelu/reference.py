"""The reference of :mod:`common.ops.bias_gelu`. Shapes: T tokens, F features."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.fp8_cast.reference import (
    E4M3,
    E5M2,
    Fp8Tensor,
    Handover,
    Scaling,
    computed_reference,
    widen_fp8,
    widened,
)
from common.ops.triton_support import widen


class Activated(NamedTuple):
    """What forward gives.

    Attributes:
        y: (T, F), dtype of the product; None where FP8 was asked for.
        y8: (T, F), e4m3; None where it was not asked for.
        saved: (T, F), what backward takes: the product, or its sum with the bias in e4m3.
    """

    y: Tensor | None
    y8: Fp8Tensor | None
    saved: Tensor | Fp8Tensor


class Gradients(NamedTuple):
    """What backward gives.

    Attributes:
        dx: (T, F), dtype of the result's gradient; None where FP8 was asked for.
        dx8: (T, F), e5m2; None where it was not asked for.
        bias: (F,), the sums of dx over tokens, fp32, or fp64 of fp64.
    """

    dx: Tensor | None
    dx8: Fp8Tensor | None
    bias: Tensor


class BiasGelu(NamedTuple):
    """Functions without autograd; see :func:`forward_reference` and :func:`backward_reference`."""

    forward: Callable[..., Activated]
    backward: Callable[..., Gradients]


def bias_gelu_reference(
    x_TF: Tensor, bias_F: Tensor, *, fp8: Scaling | None = None, handover: Handover | None = None
) -> Tensor | Fp8Tensor:
    """Reference implementation.

    Args:
        x_TF: the product, without its bias.
        bias_F: the bias.
        fp8: scale of the result in e4m3, which then takes the place of the one in 16 bits.
        handover: of the gradient of ``x_TF``, if that is wanted in e5m2.

    Returns:
        (T, F), dtype of ``x_TF``, or in FP8.
    """
    y_TF = F.gelu(widened(x_TF, handover) + widen(bias_F), approximate="tanh")
    if fp8 is None:
        return y_TF.to(x_TF.dtype)
    return replace(computed_reference(y_TF, fp8, E4M3, x_TF.dtype), source=y_TF.to(x_TF.dtype))


@torch.no_grad()
def forward_reference(
    x_TF: Tensor,
    bias_F: Tensor | None,
    *,
    fp8: Scaling | None = None,
    save_fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Activated:
    """Reference implementation.

    Args:
        x_TF: the product; contiguous.
        bias_F: its bias; None where there is none, or where the product has added it.
        fp8: scale of the result in e4m3, which then takes the place of y.
        save_fp8: scale of the product with its bias in e4m3, if that is what is to be saved.
        frozen_scales: leave the scales as they are.
    """
    dtype = x_TF.dtype
    z_TF = _sum(x_TF, bias_F)
    y_TF = F.gelu(z_TF, approximate="tanh")
    y8 = None if fp8 is None else computed_reference(y_TF, fp8, E4M3, dtype, frozen_scales)
    saved = x_TF if save_fp8 is None else computed_reference(z_TF, save_fp8, E4M3, dtype, frozen_scales)
    return Activated(y_TF.to(dtype) if y8 is None else None, y8, saved)


@torch.no_grad()
def backward_reference(
    dy_TF: Tensor,
    saved: Tensor | Fp8Tensor,
    bias_F: Tensor | None,
    *,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Gradients:
    """Reference implementation.

    Args:
        dy_TF: gradient of the result; contiguous.
        saved: of :class:`Activated`.
        bias_F: as forward had it; what is saved in FP8 has it already.
        fp8: scale of the gradient in e5m2, if that is wanted.
        frozen_scales: leave the scale as it is.
    """
    dy_wide_TF = widen(dy_TF)
    z_TF = widen_fp8(saved).to(dy_wide_TF.dtype) if isinstance(saved, Fp8Tensor) else _sum(saved, bias_F)
    twice = 2 * math.sqrt(2 / math.pi)
    # (1 + tanh u) / 2 is sigmoid(2 u), which has its digits where tanh is almost -1
    gate_TF = torch.sigmoid(twice * (z_TF + 0.044715 * z_TF**3))
    dx_TF = dy_wide_TF * gate_TF * (1 + z_TF * (1 - gate_TF) * twice * (1 + 3 * 0.044715 * z_TF**2))
    if fp8 is None:
        return Gradients(dx_TF.to(dy_TF.dtype), None, dx_TF.sum(0))
    return Gradients(None, computed_reference(dx_TF, fp8, E5M2, dy_TF.dtype, frozen_scales), dx_TF.sum(0))


def _sum(x_TF: Tensor, bias_F: Tensor | None) -> Tensor:
    return widen(x_TF) if bias_F is None else widen(x_TF) + widen(bias_F)
