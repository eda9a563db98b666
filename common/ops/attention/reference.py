"""The reference of :mod:`common.ops.attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from common.ops.dropout.reference import DropoutMask, keep_rows, scale_of_kept
from common.ops.fp8_cast.reference import (
    E5M2,
    SAMPLED_ROWS_OF_COMPUTED,
    Handover,
    Scaling,
    computed_reference,
    scale_of,
)
from common.ops.triton_support import widen

HEAD_DIMS = (32, 64, 128)
"""Head dimensions of the Triton kernels."""

LARGEST = torch.finfo(E5M2).max
GRADIENT_MARGIN = 1024.0
"""How many times larger than the gradient of the context the gradients of queries, keys and values may be at the first
use of their scale. Then e5m2 represents values down to 2**-20 of the gradient of the context as normal numbers."""


def attention_reference(
    qkv_T3HD: Tensor,
    starts_S: Tensor,
    lengths_S: Tensor,
    max_length: int,
    dropout: DropoutMask,
    bias_3HD: Tensor | None = None,
    *,
    handover: Handover | None = None,
) -> Tensor:
    """Compute attention on a padded copy of the sequences, with S * H * max_length**2 probabilities.

    Args:
        qkv_T3HD: queries, keys and values of every token.
        starts_S: first token of each sequence, int32 or int64.
        lengths_S: number of tokens of each sequence, 0 for absent ones. Sequences must not overlap.
        max_length: largest possible length of a sequence.
        dropout: dropout of the probabilities.
        bias_3HD: bias with 3 * H * D elements that the preceding matrix product has already added to ``qkv_T3HD``,
            detached. It does not change the result, but gets its gradient: that of ``qkv_T3HD``, summed over tokens.
        handover: receives the gradient of ``qkv_T3HD`` in e5m2, (T, 3 * H * D), if it has a scale.

    Returns:
        The context (T, H, D), dtype of ``qkv_T3HD``.
    """
    T, _, H, D = qkv_T3HD.shape
    p, seed, site = dropout
    dtype = qkv_T3HD.dtype
    scale: list[Tensor] = []
    if handover is not None and handover.scaling is not None:
        qkv_T3HD = _CastGradient.apply(qkv_T3HD, handover, scale)
    if bias_3HD is not None:
        qkv_T3HD = qkv_T3HD + (bias_3HD - bias_3HD.detach()).view(3, H, D)  # zero, with the gradient of a bias
    column_L = torch.arange(max_length, device=qkv_T3HD.device)
    inside_SL = column_L < lengths_S.unsqueeze(1)
    token_SL = torch.where(inside_SL, starts_S.unsqueeze(1) + column_L, 0)
    padded = widen(qkv_T3HD.index_select(0, token_SL.flatten())).view(-1, max_length, 3, H, D)
    padded = torch.where(inside_SL[:, :, None, None, None], padded, 0.0)
    q_SHLD, k_SHLD, v_SHLD = padded.permute(2, 0, 3, 1, 4)

    scores_SHLL = torch.matmul(q_SHLD * (1 / math.sqrt(D)), k_SHLD.transpose(2, 3))
    # finite, so that a sequence without any key has no NaN
    scores_SHLL = scores_SHLL.masked_fill(~inside_SL[:, None, None, :], torch.finfo(scores_SHLL.dtype).min)
    probabilities_SHLL = scores_SHLL.softmax(-1)
    if p > 0.0:
        rows_SHL = token_SL.unsqueeze(1) * H + torch.arange(H, device=qkv_T3HD.device).view(1, H, 1)
        keep_SHLL = keep_rows(seed, site, rows_SHL, max_length, p)
        probabilities_SHLL = torch.where(keep_SHLL, probabilities_SHLL * scale_of_kept(p), 0.0)
    context_SLHD = torch.matmul(probabilities_SHLL, v_SHLD).transpose(1, 2)

    # padding is written to an additional row, which is cut off
    target = torch.where(inside_SL, token_SL, T).flatten()
    context = context_SLHD.new_zeros(T + 1, H, D).index_copy(0, target, context_SLHD.flatten(0, 1))
    context_THD = context[:T].to(dtype)
    if handover is not None and handover.scaling is not None:
        context_THD = _ScaleOfGradient.apply(context_THD, handover.scaling, scale)
    return context_THD


class _ScaleOfGradient(torch.autograd.Function):
    """Identity of the context. Its backward pass estimates the first scale from the gradient of the context."""

    @staticmethod
    def forward(ctx: Any, context_THD: Tensor, scaling: Scaling, scale: list[Tensor]) -> Tensor:
        ctx.scaling, ctx.scale = scaling, scale
        return context_THD.view_as(context_THD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        d_context_THD = gradients[0]
        step = -(-len(d_context_THD) // SAMPLED_ROWS_OF_COMPUTED)
        sampled = d_context_THD[::step].float().abs()
        amax = sampled.where(sampled.isfinite(), 0.0).amax() * GRADIENT_MARGIN
        first = scale_of(amax, LARGEST, otherwise=torch.ones_like(amax))
        known = ctx.scaling.scale
        ctx.scale[:] = [torch.where(known > 0, known, first)]
        return d_context_THD, None, None


class _CastGradient(torch.autograd.Function):
    """Queries, keys and values in the dtype of the arithmetic. Backward puts their gradient into the handover."""

    @staticmethod
    def forward(ctx: Any, qkv_T3HD: Tensor, handover: Handover, scale: list[Tensor]) -> Tensor:
        ctx.handover, ctx.scale, ctx.dtype = handover, scale, qkv_T3HD.dtype
        return widen(qkv_T3HD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dqkv_T3HD, scaling = gradients[0], ctx.handover.scaling
        used = Scaling(ctx.scale[0], scaling.pending)
        dqkv8 = computed_reference(dqkv_T3HD.flatten(1), used, E5M2, ctx.dtype, frozen_scales=True)
        amax = dqkv_T3HD.float().abs().amax()
        scaling.scale.copy_(scale_of(amax, LARGEST, otherwise=scaling.scale))
        return ctx.handover.leave(dqkv8).view(dqkv_T3HD.shape), None, None
