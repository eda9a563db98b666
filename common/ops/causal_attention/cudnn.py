"""cuDNN's fused attention through PyTorch's operators.

It supports grouped queries: keys, values and their gradients have K heads. The operators take (B, H, S, D), here as
transposed views of (B, S, H, D); results have the same memory order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.causal_attention.parts import Library
from common.ops.causal_attention.reference import Saved

_NO_DROPOUT = 0.0


def forward(
    q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """See :class:`common.ops.causal_attention.parts.Forward`."""
    q, k, v = (x.transpose(1, 2) for x in (q_BQHD, k_BSKD, v_BSKD))
    o, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, _NO_DROPOUT, causal, False, scale=scale
    )
    # in some versions of PyTorch lse has a last dimension of 1, which backward expects
    return o.transpose(1, 2), lse.view(q.shape[:3]), (seed, offset, lse.shape)


def backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`common.ops.causal_attention.parts.Backward`."""
    seed, offset, lse_shape = saved.state
    do, q, k, v, o = (x.transpose(1, 2) for x in (do_BQHD, saved.q, saved.k, saved.v, saved.o))
    lse = saved.lse.contiguous().view(lse_shape)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], _NO_DROPOUT, causal,
        scale=saved.scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


LIBRARY = Library(forward, backward)
