"""Fused attention of Transformer Engine, through the two functions that its attention module calls.

They need contiguous (B, S, H, D) tensors. With more keys than queries the mask is aligned to the last key. Every
forward pass advances PyTorch's CUDA generator, although there is no dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.causal_attention.parts import Library
from common.ops.causal_attention.reference import Saved


def forward(
    q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """See :class:`common.ops.causal_attention.parts.Forward`."""
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_fwd

    q, k, v = (x.contiguous() for x in (q_BQHD, k_BSKD, v_BSKD))
    o, (stats, generator_state) = fused_attn_fwd(
        True, *_lengths(q, k), q, k, v, q.dtype, FusedAttnBackend["F16_arbitrary_seqlen"],
        attn_scale=scale, **_options(q, k, causal),
    )  # fmt: skip
    return o, stats.view(stats.shape[:3]), (generator_state,)


def backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`common.ops.causal_attention.parts.Backward`."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_bwd

    q, k, v, o, do, stats = (x.contiguous() for x in (*saved[:4], do_BQHD, saved.lse))
    dq, dk, dv, *_ = fused_attn_bwd(
        *_lengths(q, k), q, k, v, o, do, q.dtype, TE_DType[q.dtype], [stats.unsqueeze(3), *saved.state],
        FusedAttnBackend["F16_arbitrary_seqlen"], attn_scale=saved.scale,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_options(q, k, causal),
    )  # fmt: skip
    return dq, dk, dv


def _lengths(q_BQHD: Tensor, k_BSKD: Tensor) -> tuple[int, int, Tensor, Tensor]:
    """Return the numbers of queries and keys per row, and the first query and key of each row, int32 (B + 1,)."""
    rows, queries, keys = q_BQHD.shape[0], q_BQHD.shape[1], k_BSKD.shape[1]
    firsts = torch.arange(rows + 1, dtype=torch.int32, device=q_BQHD.device)
    return queries, keys, firsts * queries, firsts * keys


def _options(q_BQHD: Tensor, k_BSKD: Tensor, causal: bool) -> dict[str, Any]:
    mask = "no_mask"
    if causal:
        mask = "causal" if q_BQHD.shape[1] == k_BSKD.shape[1] else "causal_bottom_right"
    return {
        "qkv_layout": "bshd_bshd_bshd",
        "attn_mask_type": mask,
        "window_size": (-1, 0 if causal else -1),
        "cuda_graph": torch.cuda.is_current_stream_capturing(),
    }


LIBRARY = Library(forward, backward, prefixes=True)
