"""FlashAttention 2 through PyTorch's operators (Dao, arXiv:2307.08691).

It supports grouped queries: keys, values and their gradients have K heads.
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
    o, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q_BQHD, k_BSKD, v_BSKD, None, None, q_BQHD.shape[1], k_BSKD.shape[1], _NO_DROPOUT, causal, False, scale=scale
    )
    return o, lse, (state, unused)


def backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`common.ops.causal_attention.parts.Backward`."""
    state, unused = saved.state
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        do_BQHD, saved.q, saved.k, saved.v, saved.o, saved.lse.contiguous(), None, None,
        saved.q.shape[1], saved.k.shape[1], _NO_DROPOUT, causal, state, unused, scale=saved.scale,
    )  # fmt: skip
    return dq, dk, dv


LIBRARY = Library(forward, backward)
