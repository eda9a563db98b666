"""GELU of a matrix product and its bias, in the tanh form that BERT was trained with.

``0.5 z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))`` with z = x + bias: Hendrycks, Gimpel, arXiv:1606.08415, section 2.

Between two FP8 matrix products the kernels write the result and the gradient in FP8, rounded once from the fp32
arithmetic, with delayed scales (:mod:`common.ops.fp8_cast`).

There is a function with autograd, and a pair of functions for callers with a hand-written backward pass. These keep
``saved`` for backward: x itself, or z in e4m3.

Shapes: T tokens, F features.
"""

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
    Activated,
    Fp8Tensor,
    Handover,
    Scaling,
    computed_reference,
    widen_fp8,
    widened,
)
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


class Gradients(NamedTuple):
    """Results of the backward pass; either ``dx`` or ``dx8`` is None.

    Attributes:
        dx: (T, F), dtype of dy.
        dx8: (T, F), e5m2.
        bias: (F,), sum of dx over tokens, fp32, or fp64 for fp64 inputs.
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
    """Return ``gelu(x + bias)`` with autograd: (T, F), dtype of ``x_TF``, or e4m3.

    Args:
        x_TF: result of a matrix product without bias.
        fp8: scale of a result in e4m3; None for a result in the dtype of ``x_TF``.
        handover: receives the gradient of ``x_TF`` in e5m2 if it has a scale.
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
    """Compute ``gelu(x + bias)``.

    Args:
        x_TF: result of a matrix product; contiguous.
        bias_F: bias; None if there is none, or if the matrix product has added it.
        fp8: scale of a result in e4m3; None for a result in the dtype of ``x_TF``.
        save_fp8: scale of x + bias in e4m3 to save for backward; None to save ``x_TF``.
        frozen_scales: do not update the scales.
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
    """Compute the gradients of x and of the bias.

    Args:
        dy_TF: gradient of the result; contiguous.
        saved: attribute of :class:`Activated`.
        bias_F: bias of forward; ignored if ``saved`` is in FP8, because it includes the bias.
        fp8: scale of a gradient in e5m2; None for the dtype of ``dy_TF``.
        frozen_scales: do not update the scale.
    """
    dy_widened_TF = widen(dy_TF)
    z_TF = widen_fp8(saved).to(dy_widened_TF.dtype) if isinstance(saved, Fp8Tensor) else _sum(saved, bias_F)
    twice = 2 * math.sqrt(2 / math.pi)
    # (1 + tanh u) / 2 is sigmoid(2 u), which is precise also where tanh is almost -1
    gate_TF = torch.sigmoid(twice * (z_TF + 0.044715 * z_TF**3))
    dx_TF = dy_widened_TF * gate_TF * (1 + z_TF * (1 - gate_TF) * twice * (1 + 3 * 0.044715 * z_TF**2))
    if fp8 is None:
        return Gradients(dx_TF.to(dy_TF.dtype), None, dx_TF.sum(0))
    return Gradients(None, computed_reference(dx_TF, fp8, E5M2, dy_TF.dtype, frozen_scales), dx_TF.sum(0))


def _sum(x_TF: Tensor, bias_F: Tensor | None) -> Tensor:
    return widen(x_TF) if bias_F is None else widen(x_TF) + widen(bias_F)


BIAS_GELU = Operation(
    "bias_gelu",
    bias_gelu_reference,
    {
        "triton": triton_kernels("common.ops.bias_gelu.triton:bias_gelu"),
    },
    kernel_names=(("GELU", r"^bias_gelu_"),),
    cases="common.ops.bias_gelu.cases",
)
"""Signature: ``bias_gelu(x_TF, bias_F, *, fp8=None, handover=None)``."""

BIAS_GELU_PASSES = Operation(
    "bias_gelu_passes",
    BiasGelu(forward_reference, backward_reference),
    {
        "triton": triton_kernels("common.ops.bias_gelu.triton"),
    },
    cases="common.ops.bias_gelu.cases:SEPARATE",
)
"""Functions: those of :class:`BiasGelu`."""
