# mypy: allow-untyped-defs
"""Triton kernels of the mask head's last layer for one class per region.

A program handles a share of a region's pixels, whose C channels are contiguous, and one row of the weight. Forward
reads the features once; backward reads them again and writes their gradient. For 1,536 slots of 784 pixels with 256
channels in 16 bit these are 617 MB and 1.2 GB, 145 and 290 us at 4.3 TB/s on an H200. For slots without an object,
only the zeros of the gradient are written.

The weight gradient is reduced in two stages, without atomics: every program stores its sums, and one program per class
then adds the sums of its regions in order.

Shapes: R regions, P pixels of a region, C channels, K classes, S shares of a region's pixels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from benchmarks.maskrcnn.ops.selected_logits import check
from common.ops.tile import Tile


@triton.jit
def selected_logits_forward_kernel(
    x_ptr,  # (R, P, C)
    weight_ptr,  # (K, C)
    bias_ptr,  # (K,)
    class_ptr,  # (R,) int64
    logits_ptr,  # (R, P) fp32
    P, C,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store the logits of BLOCK pixels of a region for the region's class; 0 for slots without an object.

    Grid (ceil(P / BLOCK), R).
    """
    region = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = pixel < P
    own = tl.load(class_ptr + region)
    logits = tl.zeros((BLOCK,), tl.float32)
    if own >= 0:
        channel = tl.arange(0, BLOCK_C)
        weight = tl.load(weight_ptr + own * C + channel, mask=channel < C, other=0.0).to(tl.float32)
        offset = region * P * C + pixel[:, None] * C + channel[None, :]
        x = tl.load(x_ptr + offset, mask=exists[:, None] & (channel < C)[None, :], other=0.0).to(tl.float32)
        logits = tl.sum(x * weight[None, :], 1) + tl.load(bias_ptr + own).to(tl.float32)
    tl.store(logits_ptr + region * P + pixel, logits, mask=exists)


@triton.jit
def selected_logits_backward_kernel(
    d_logits_ptr,  # (R, P) fp32
    x_ptr,  # (R, P, C)
    weight_ptr,  # (K, C)
    class_ptr,  # (R,) int64
    dx_ptr,  # (R, P, C)
    partial_ptr,  # (R, S, C + 1) fp32 sums for weight and bias; not written for slots without an object
    P, C,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x in a share of a region's pixels, and this share's sums for weight and bias.

    Grid (S, R). A program handles every S-th block of BLOCK pixels.
    """
    region = tl.program_id(1).to(tl.int64)
    own = tl.load(class_ptr + region)
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    first = tl.program_id(0) * BLOCK
    if own >= 0:
        weight = tl.load(weight_ptr + own * C + channel, mask=inside, other=0.0).to(tl.float32)
        weight_sums = tl.zeros((BLOCK_C,), tl.float32)
        bias_sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(first, P, tl.num_programs(0) * BLOCK):
            pixel = start + tl.arange(0, BLOCK)
            mask = (pixel < P)[:, None] & inside[None, :]
            offset = region * P * C + pixel[:, None] * C + channel[None, :]
            d_logits = tl.load(d_logits_ptr + region * P + pixel, mask=pixel < P, other=0.0)
            x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            weight_sums += tl.sum(x * d_logits[:, None], 0)
            bias_sums += d_logits
            dx = d_logits[:, None] * weight[None, :]
            tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        partial_ptr += (region * tl.num_programs(0) + tl.program_id(0)) * (C + 1)
        tl.store(partial_ptr + channel, weight_sums, mask=inside)
        tl.store(partial_ptr + C, tl.sum(bias_sums, 0))
    else:
        nothing = tl.zeros((BLOCK, BLOCK_C), dx_ptr.dtype.element_ty)
        for start in range(first, P, tl.num_programs(0) * BLOCK):
            pixel = start + tl.arange(0, BLOCK)
            offset = region * P * C + pixel[:, None] * C + channel[None, :]
            tl.store(dx_ptr + offset, nothing, mask=(pixel < P)[:, None] & inside[None, :])


@triton.jit
def selected_logits_sums_kernel(
    partial_ptr,  # (R, S, C + 1) fp32
    class_ptr,  # (R,) int64
    d_weight_ptr,  # (K, C)
    d_bias_ptr,  # (K,)
    R, S, C,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write a class's weight and bias gradients, summed over its regions. Grid (K, ceil((C + 1) / BLOCK_C))."""
    own = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for start in range(0, R * S, BLOCK):
        row = start + tl.arange(0, BLOCK)
        counts = (row < R * S) & (tl.load(class_ptr + row // S, mask=row < R * S, other=-1) == own)
        offset = row[:, None].to(tl.int64) * (C + 1) + column[None, :]
        total += tl.load(partial_ptr + offset, mask=counts[:, None] & (column <= C)[None, :], other=0.0)
    sums = tl.sum(total, 0)
    tl.store(d_weight_ptr + own * C + column, sums.to(d_weight_ptr.dtype.element_ty), mask=column < C)
    tl.store(d_bias_ptr + own + (column - C), sums.to(d_bias_ptr.dtype.element_ty), mask=column == C)


TILES: dict[str, Tile] = {
    "forward": Tile(elements=8192, warps=4),
    "backward": Tile(elements=8192, shares=4, warps=4),
    "sums": Tile(rows=64, columns=64, warps=4),
}
"""Name of the pass to its tile of whole pixels. ``shares``: maximum programs per region, each with its own sums."""


class _SelectedLogits(Function):
    @staticmethod
    def forward(ctx: Any, x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> Tensor:
        x_RPC, weight_KC = x_RPC.contiguous(), weight_KC.contiguous()
        ctx.save_for_backward(x_RPC, weight_KC, class_R)
        ctx.bias_dtype = bias_K.dtype
        regions, pixels, channels = x_RPC.shape
        logits_RP = torch.empty((regions, pixels), dtype=torch.float32, device=x_RPC.device)
        tile = TILES["forward"]
        block, width = _block(tile.elements, pixels, channels)
        if logits_RP.numel():
            selected_logits_forward_kernel[(triton.cdiv(pixels, block), regions)](
                x_RPC, weight_KC, bias_K.contiguous(), class_R, logits_RP, pixels, channels,
                BLOCK=block, BLOCK_C=width, num_warps=tile.warps,
            )  # fmt: skip
        return logits_RP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_RPC, weight_KC, class_R = ctx.saved_tensors
        regions, pixels, channels = x_RPC.shape
        tile = TILES["backward"]
        block, width = _block(tile.elements, pixels, channels)
        shares = min(tile.shares, triton.cdiv(pixels, block))
        dx_RPC, d_weight_KC = torch.empty_like(x_RPC), torch.empty_like(weight_KC)
        d_bias_K = torch.empty(len(weight_KC), dtype=ctx.bias_dtype, device=x_RPC.device)
        partial_RSX = torch.empty((regions, shares, channels + 1), dtype=torch.float32, device=x_RPC.device)
        if dx_RPC.numel():
            selected_logits_backward_kernel[(shares, regions)](
                gradients[0].contiguous(), x_RPC, weight_KC, class_R, dx_RPC, partial_RSX, pixels, channels,
                BLOCK=block, BLOCK_C=width, num_warps=tile.warps,
            )  # fmt: skip
        sums = TILES["sums"]
        selected_logits_sums_kernel[(len(weight_KC), triton.cdiv(channels + 1, sums.columns))](
            partial_RSX, class_R, d_weight_KC, d_bias_K, regions, shares, channels,
            BLOCK=sums.rows, BLOCK_C=sums.columns, num_warps=sums.warps,
        )  # fmt: skip
        return dx_RPC, d_weight_KC, d_bias_K, None


def _block(elements: int, pixels: int, channels: int) -> tuple[int, int]:
    """Return the pixels and channels of a tile."""
    width = triton.next_power_of_2(channels)
    return max(min(elements // width, triton.next_power_of_2(pixels)), 1), width


def selected_logits(x_RPC: Tensor, weight_KC: Tensor, bias_K: Tensor, class_R: Tensor) -> Tensor:
    """Return the logits (R, P) of the selected classes, fp32.

    See :func:`benchmarks.maskrcnn.ops.selected_logits.selected_logits_reference`.
    """
    check(x_RPC, weight_KC, bias_K, class_R)
    logits_RP: Tensor = _SelectedLogits.apply(x_RPC, weight_KC, bias_K, class_R.contiguous())
    return logits_RP
