"""Dropout and joined frames through the kernel beside this file; nothing is stored for backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.rnnt.ops.joined_dropout import kernels
from benchmarks.rnnt.ops.joined_dropout.reference import JOINED
from common.ops.dropout.triton import Rate, rate

BLOCK = 4096
WARPS = 8


def _launch(x_TBH: Tensor, y_SBK: Tensor, given: Rate, seed: Tensor, site: int, join: bool) -> None:
    frames, batch, width = x_TBH.shape
    size, block = batch * width, min(BLOCK, max(triton.next_power_of_2(batch * width), 2))
    if x_TBH.numel():
        kernels.joined_dropout_kernel[(triton.cdiv(size, block), JOINED * len(y_SBK) if join else frames)](
            x_TBH, y_SBK, seed, site, frames, size,
            H=width, JOIN=join, **given._asdict(), BLOCK=block, num_warps=WARPS,
        )  # fmt: skip


class _JoinedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TBH: Tensor, given: Rate, seed: Tensor, site: int) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.given, ctx.site, ctx.shape = given, site, x_TBH.shape
        frames, batch, width = x_TBH.shape
        y_SBK = x_TBH.new_empty((-(-frames // JOINED), batch, JOINED * width))
        _launch(x_TBH.contiguous(), y_SBK, given, seed, site, join=True)
        return y_SBK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        dx_TBH = gradients[0].new_empty(ctx.shape)
        _launch(dx_TBH, gradients[0].contiguous(), ctx.given, seed, ctx.site, join=False)
        return dx_TBH, None, None, None


def joined_dropout(x_TBH: Tensor, p: float, seed: Tensor, site: int) -> Tensor:
    """See :func:`benchmarks.rnnt.ops.joined_dropout.reference.joined_dropout_reference`; B H is even."""
    result: Tensor = _JoinedDropout.apply(x_TBH, rate(p), seed, site)
    return result
