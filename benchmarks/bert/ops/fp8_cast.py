"""Casts to FP8 with delayed scaling: ``round(scale * x)``, its transpose, and the scale of the next use, in one pass.

A scale maps a tensor onto the range of its format, ``scale = largest value of the format / amax``. *Delayed* means that
amax, the largest magnitude, is that of the tensor's previous use: so the cast reads its input once, and leaves behind
the scale that its own amax gives (Transformer Engine's ``DelayedScaling`` with ``amax_history_len=1``,
``amax_compute_algo="most_recent"``, ``margin=0``). What is larger than the previous amax saturates. An amax that is
zero or not finite leaves the scale as it is. NaN stays NaN and infinity becomes NaN, so that an overflow still arrives
in the gradients.

At the first use nothing is known (scale 0). The scale then comes from the amax of at most ``SAMPLED_ROWS`` evenly
spaced rows with ``FIRST_MARGIN`` to spare, chosen on the device: no second pass over the tensor, no launch that all
later uses would pay for, and none of the zeros that a fixed first scale would make of gradients around 1e-7. A
floating-point format loses nothing by a few bits of margin.

The formats are e4m3fn (448 at most) for activations and weights, and e5m2 (57,344) for gradients: Micikevicius et al.,
FP8 Formats for Deep Learning, arXiv:2209.05433. Shapes: M rows, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported

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


def _cast_triton(*args: Any) -> Fp8Tensor:
    from benchmarks.bert.ops import fp8_cast_triton  # triton is imported only where it is used

    return fp8_cast_triton.cast(*args)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _cast_triton, triton_unsupported),
    "torch": Implementation("torch", cast_torch, always),
}
"""Signature: ``cast(x, scaling, dtype, transpose) -> Fp8Tensor``; a request's channels are K."""
