"""The plain version of :mod:`common.ops.fp8_cast`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

SAMPLED_ROWS = 256
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


@torch.no_grad()
def cast_torch(x_MK: Tensor, scaling: Scaling, dtype: torch.dtype, transpose: bool) -> Fp8Tensor:
    """Plain version.

    Args:
        x_MK: fp16 or bf16; contiguous.
        scaling: of this tensor; it is left with the scale for the next use.
        dtype: ``E4M3`` or ``E5M2``.
        transpose: whether the transpose is wanted too.
    """
    largest = torch.finfo(dtype).max
    known = scaling.scale
    scale = torch.where(known > 0, known, _first_scale(x_MK, largest))
    wide_MK = x_MK.float()
    rounded_MK = (wide_MK * scale).clamp(-largest, largest)
    data_MK = rounded_MK.masked_fill(~wide_MK.isfinite(), float("nan")).to(dtype)
    known.copy_(_scale_of(wide_MK.abs().amax(), largest, otherwise=known))
    return Fp8Tensor(data_MK, data_MK.t().contiguous() if transpose else None, scale.reciprocal(), x_MK)


def _first_scale(x_MK: Tensor, largest: float) -> Tensor:
    step = -(-x_MK.shape[0] // SAMPLED_ROWS)
    amax = x_MK[::step].float().abs().amax() * FIRST_MARGIN
    return _scale_of(amax, largest, otherwise=torch.ones_like(amax))


def _scale_of(amax: Tensor, largest: float, otherwise: Tensor) -> Tensor:
    scale = (torch.full_like(amax, largest) / amax).clamp(max=LARGEST_SCALE)  # largest / amax would round twice
    return torch.where((amax > 0) & (amax < float("inf")), scale, otherwise)
