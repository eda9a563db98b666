"""Dropout with the Triton kernels of :mod:`common.ops.dropout.kernels`.

Backward recomputes the mask from the hash. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.dropout import kernels
from common.ops.dropout.reference import scale_of_kept, threshold

BLOCK = 4096
WARPS = 8


class Rate(NamedTuple):
    """A dropout probability in the form of kernel arguments.

    Attributes:
        THRESHOLD: dropped fraction in units of 1/65536.
        INVERSE_KEEP: factor of kept elements.
    """

    THRESHOLD: int
    INVERSE_KEEP: float


def rate(p: float) -> Rate:
    """Return the kernel arguments for a dropout probability.

    Raises:
        ValueError: see :func:`common.ops.dropout.reference.threshold`.
    """
    return Rate(threshold(p), scale_of_kept(p))


def _launch(x: Tensor, given: Rate, seed: Tensor, site: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    kernels.dropout_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, y, seed, site, x.numel(), **given._asdict(), BLOCK=BLOCK, num_warps=WARPS
    )
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Rate, seed: Tensor, site: int) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.given, ctx.site = given, site
        return _launch(x, given, seed, site)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        return _launch(gradients[0], ctx.given, seed, ctx.site), None, None, None


def dropout(x: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """See :func:`common.ops.dropout.reference.dropout_reference`."""
    given = rate(p)
    if given.THRESHOLD == 0 or x.numel() == 0:
        return x
    result: Tensor = _Dropout.apply(x, given, seed, site)
    return result
