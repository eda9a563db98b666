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
"""Of results that a kernel computes, each of whose programs computes the sample first."""

FIRST_MARGIN = 4.0
LARGEST_SCALE = 2.0**126
"""A tensor of denormal numbers would ask for more; the inverse of this one is still a normal number."""


class Scaling(NamedTuple):
    """State of the scale of one tensor, on the tensor's device; casts update it in place.

    Attributes:
        scale: 0-d fp32, for the next use; 0 before the first.
        pending: int32 (2,), scratch of the Triton kernel: zeros between casts.
    """

    scale: Tensor
    pending: Tensor


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in FP8: ``data * scale_inverse``.

    Attributes:
        data: (M, K) FP8, rows contiguous.
        transposed: (K, M) FP8, the same values, rows contiguous; None where nobody needs them.
        scale_inverse: 0-d fp32, of the scale that the values were cast with; nobody writes to it again.
        source: (M, K) in the dtype that the values stand for. Gradients go to it; its content is never read, so that a
            kernel that writes FP8 alone may give an expanded scalar.
    """

    data: Tensor
    transposed: Tensor | None
    scale_inverse: Tensor
    source: Tensor


@dataclass
class Handover:
    """The gradient of a product's result in FP8, which the one operation that reads the result writes itself.

    Autograd casts a gradient to the dtype of what it belongs to; so the FP8 form goes past it, and autograd carries its
    ``source``.

    Attributes:
        scaling: of this gradient; None where it is cast later, or stays in 16 bits.
        gradient: what the reader's backward pass left for the product's.
    """

    scaling: Scaling | None
    gradient: Fp8Tensor | None = None

    def leave(self, gradient: Fp8Tensor) -> Tensor:
        """Leave the gradient for the product; what autograd carries instead."""
        self.gradient = gradient
        return gradient.source

    def take(self) -> Fp8Tensor | None:
        """The gradient, once."""
        taken, self.gradient = self.gradient, None
        return taken


@torch.no_grad()
def cast_reference(
    x_MK: Tensor, scaling: Scaling, dtype: torch.dtype, transpose: bool, frozen_scales: bool = False
) -> Fp8Tensor:
    """Reference implementation.

    Args:
        x_MK: fp16 or bf16; contiguous.
        scaling: of this tensor; it is left with the scale for the next use.
        dtype: ``E4M3`` or ``E5M2``.
        transpose: whether the transpose is wanted too.
        frozen_scales: leave the scale as it is.
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
    """What a kernel writes that computes values and casts them itself.

    Args:
        values_MK: in the dtype of the arithmetic, not rounded to half precision first.
        scaling: of this tensor; it is left with the scale for the next use.
        dtype: ``E4M3`` or ``E5M2``.
        of: dtype that the values stand for.
        frozen_scales: leave the scale as it is.
    """
    source = torch.empty((), dtype=of, device=values_MK.device).expand(values_MK.shape)
    return _cast(values_MK.float(), scaling, dtype, SAMPLED_ROWS_OF_COMPUTED, source, frozen_scales)


def widened(x_MK: Tensor, handover: Handover | None) -> Tensor:
    """``x`` in the dtype of the arithmetic, for an operation whose gradient of ``x`` goes to ``handover``, if any.

    Args:
        x_MK: a product's result.
        handover: of its gradient, which is cast from the dtype of the arithmetic.
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
    """The values of an FP8 tensor, rounded as fp32 products of data and inverse scale."""
    return (x8.data.float() * x8.scale_inverse).to(to)


def _cast(
    wide_MK: Tensor, scaling: Scaling, dtype: torch.dtype, sampled: int, source: Tensor, frozen_scales: bool
) -> Fp8Tensor:
    largest = torch.finfo(dtype).max
    known = scaling.scale
    scale = torch.where(known > 0, known, _first_scale(wide_MK, largest, sampled))
    rounded_MK = (wide_MK * scale).clamp(-largest, largest)
    data_MK = rounded_MK.masked_fill(~wide_MK.isfinite(), float("nan")).to(dtype)
    if not frozen_scales:
        known.copy_(scale_of(wide_MK.abs().amax(), largest, otherwise=known))
    return Fp8Tensor(data_MK, None, scale.reciprocal(), source)


def _first_scale(wide_MK: Tensor, largest: float, sampled: int) -> Tensor:
    step = -(-wide_MK.shape[0] // sampled)
    amax = wide_MK[::step].abs().amax() * FIRST_MARGIN
    return scale_of(amax, largest, otherwise=torch.ones_like(amax))


def scale_of(amax: Tensor, largest: float, otherwise: Tensor) -> Tensor:
    """The scale that maps ``amax`` to a format's ``largest`` value; ``otherwise`` where that is 0 or not finite."""
    scale = (torch.full_like(amax, largest) / amax).clamp(max=LARGEST_SCALE)  # largest / amax would round twice
    return torch.where((amax > 0) & (amax < float("inf")), scale, otherwise)
