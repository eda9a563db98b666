"""The plain version of :mod:`common.ops.attention`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.ops.dropout.plain import DropoutMask, keep_rows, scale_of_kept
from common.ops.triton_support import widen

HEAD_DIMS = (32, 64, 128)
"""Head dimensions of the Triton kernels."""


def attention_torch(
    qkv_T3HD: Tensor,
    starts_S: Tensor,
    lengths_S: Tensor,
    max_length: int,
    dropout: DropoutMask,
    bias_3HD: Tensor | None = None,
) -> Tensor:
    """Attention over a padded copy of the sequences. Plain version: takes S * H * max_length**2 probabilities.

    Args:
        qkv_T3HD: queries, keys and values of every token.
        starts_S: first token of each sequence, int32 or int64.
        lengths_S: tokens of each sequence, 0 for absent ones. Sequences must not overlap.
        max_length: of a sequence.
        dropout: of the probabilities.
        bias_3HD: a bias that the matrix product before has already added to ``qkv_T3HD``, detached, any shape of
            3 * H * D elements. It changes nothing here but receives its gradient, the sum of qkv's over all tokens.

    Returns:
        context (T, H, D), dtype of ``qkv_T3HD``.
    """
    T, _, H, D = qkv_T3HD.shape
    p, seed, site = dropout
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

    # rows beyond a sequence's end go to one more row, which is cut off
    target = torch.where(inside_SL, token_SL, T).flatten()
    context = context_SLHD.new_zeros(T + 1, H, D).index_copy(0, target, context_SLHD.flatten(0, 1))
    return context[:T].to(qkv_T3HD.dtype)
