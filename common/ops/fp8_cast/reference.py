"""The reference of :mod:`common.ops.fp8_cast`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.ops.triton_support import widen

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

SAMPLED_ROWS = 256
SAMPLED_ROWS_OF_COMPUTED = 32
"""Number of sampled rows for results that a kernel computes. Smaller, because each program computes the sample."""

FIRST_MARGIN = 4.0
LARGEST_SCALE = 2.0**126
"""Largest scale; only tensors of denormal numbers would need more. Its inverse is still a normal number."""


class Scaling(NamedTuple):
    """State of the scale of one tensor, on the device of the tensor. Casts update it in place.

    Attributes:
        scale: scale of the next use, 0-d fp32; 0 before the first use.
        pending: scratch memory of the Triton kernels, int32 (2,); zeros between casts.
    """

    scale: Tensor
    pending: Tensor


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in FP8: ``data * scale_inverse``.

    Attributes:
        data: (M, K) FP8, rows contiguous.
        transposed: (K, M) FP8, the same values, rows contiguous; None if not needed.
        scale_inverse: inverse of the scale of the cast, 0-d fp32; never modified.
        source: tensor (M, K) that autograd sees, in the dtype before the cast. Its gradient is that of the matrix. Its
            values are never read, so a kernel that writes only FP8 may use an expanded scalar.
    """

    data: Tensor
    transposed: Tensor | None
    scale_inverse: Tensor
    source: Tensor


class Activated(NamedTuple):
    """Results of the forward pass of an activation; either ``y`` or ``y8`` is None.

    Attributes:
        y: (T, F), dtype of the input.
        y8: (T, F), e4m3.
        saved: input of the backward pass: the input of the activation, or its e4m3 form.
    """

    y: Tensor | None
    y8: Fp8Tensor | None
    saved: Tensor | Fp8Tensor


@dataclass
class Handover:
    """Transfer of an FP8 gradient from the consumer of a matrix product's result to the matrix product.

    Autograd would cast the gradient to the dtype of the result. So the FP8 tensor is passed here, and autograd passes
    its ``source``.

    Attributes:
        scaling: scale of this gradient; None if it is cast later or stays in 16 bits.
        gradient: gradient that the backward pass of the consumer has left, or None.
    """

    scaling: Scaling | None
    gradient: Fp8Tensor | None = None

    def leave(self, gradient: Fp8Tensor) -> Tensor:
        """Store the gradient for the matrix product, and return its ``source`` for autograd."""
        self.gradient = gradient
        return gradient.source

    def take(self) -> Fp8Tensor | None:
        """Return the gradient and remove it; None if there is none."""
        taken, self.gradient = self.gradient, None
        return taken


@torch.no_grad()
def cast_reference(
    x_MK: Tensor, scaling: Scaling, dtype: torch.dtype, transpose: bool, frozen_scales: bool = False
) -> Fp8Tensor:
    """Return (M, K) cast to FP8, with its inverse scale.

    Args:
        x_MK: fp16 or bf16; contiguous.
        scaling: scale of this tensor, which is updated for the next use.
        dtype: ``E4M3`` or ``E5M2``.
        transpose: whether to return the transpose, too.
        frozen_scales: do not update the scale.
    """
    cast = _cast(x_MK.float(), scaling, dtype, SAMPLED_ROWS, x_MK, frozen_scales)
    return replace(cast, transposed=cast.data.t().contiguous()) if transpose else cast


@torch.no_grad()
def computed_reference(
    values_MK: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    of: torch.dtype,
    frozen_scales: bool = False,
) -> Fp8Tensor:
    """Return computed values (M, K) cast to FP8, like a kernel that computes and casts them.

    Args:
        values_MK: values in the dtype of the arithmetic, not rounded to 16 bits.
        scaling: scale of this tensor, which is updated for the next use.
        dtype: ``E4M3`` or ``E5M2``.
        of: dtype of ``source``.
        frozen_scales: do not update the scale.
    """
    source = torch.empty((), dtype=of, device=values_MK.device).expand(values_MK.shape)
    return _cast(values_MK.float(), scaling, dtype, SAMPLED_ROWS_OF_COMPUTED, source, frozen_scales)


def widened(x_MK: Tensor, handover: Handover | None) -> Tensor:
    """Return ``x`` in the dtype of the arithmetic.

    Args:
        x_MK: result of a matrix product.
        handover: receives the gradient of ``x_MK`` in e5m2 if it has a scale.
    """
    if handover is None or handover.scaling is None:
        return widen(x_MK)
    result: Tensor = _Widened.apply(x_MK, handover)
    return result


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, handover: Handover) -> Tensor:
        ctx.handover, ctx.dtype = handover, x_MK.dtype
        return widen(x_MK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dx8 = computed_reference(gradients[0], ctx.handover.scaling, E5M2, ctx.dtype)
        return ctx.handover.leave(dx8), None


def widen_fp8(x8: Fp8Tensor, to: torch.dtype = torch.float32) -> Tensor:
    """Return the values of an FP8 tensor: products of data and inverse scale in fp32, cast to ``to``."""
    return (x8.data.float() * x8.scale_inverse).to(to)


def _cast(
    widened_MK: Tensor, scaling: Scaling, dtype: torch.dtype, sampled: int, source: Tensor, frozen_scales: bool
) -> Fp8Tensor:
    largest = torch.finfo(dtype).max
    known = scaling.scale
    scale = torch.where(known > 0, known, _first_scale(widened_MK, largest, sampled))
    rounded_MK = (widened_MK * scale).clamp(-largest, largest)
    data_MK = rounded_MK.masked_fill(~widened_MK.isfinite(), float("nan")).to(dtype)
    if not frozen_scales:
        known.copy_(scale_of(widened_MK.abs().amax(), largest, otherwise=known))
    return Fp8Tensor(data_MK, None, scale.reciprocal(), source)


def _first_scale(widened_MK: Tensor, largest: float, sampled: int) -> Tensor:
    step = -(-widened_MK.shape[0] // sampled)
    amax = widened_MK[::step].abs().amax() * FIRST_MARGIN
    return scale_of(amax, largest, otherwise=torch.ones_like(amax))


def scale_of(amax: Tensor, largest: float, otherwise: Tensor) -> Tensor:
    """Return the scale that maps ``amax`` to the ``largest`` value of a format, at most ``LARGEST_SCALE``.

    Where ``amax`` is 0 or not finite, return ``otherwise``.
    """
    scale = (torch.full_like(amax, largest) / amax).clamp(max=LARGEST_SCALE)  # a Python number / amax would round twice
    return torch.where((amax > 0) & (amax < float("inf")), scale, otherwise)
