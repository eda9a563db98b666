"""Attention with Transformer Engine's fused kernels (of cuDNN) for sequences of any length.

The kernels draw the dropout mask from PyTorch's CUDA generator, which is seeded per rank and saved in checkpoints, not
from the seed of a micro-batch. So masks depend on the number of ranks.
Shapes: T tokens, S sequences, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Handover


class _TeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_T3HD: Tensor, bias_3HD: Tensor | None, bounds: tuple[Tensor, Tensor], max_length: int, p: float
    ) -> Tensor:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_fwd

        qkv_T3HD = qkv_T3HD.contiguous()
        lengths, starts = bounds
        options = _options(starts, p)
        context_THD, state = fused_attn_fwd(
            True, max_length, max_length, lengths, lengths, *qkv_T3HD.unbind(1), qkv_T3HD.dtype, _back_end(), **options
        )
        ctx.save_for_backward(qkv_T3HD, context_THD, lengths, starts, *state)
        ctx.max_length, ctx.p = max_length, p
        ctx.bias = None if bias_3HD is None else (bias_3HD.shape, bias_3HD.dtype)
        result: Tensor = context_THD
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from transformer_engine.pytorch.constants import TE_DType
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd

        qkv_T3HD, context_THD, lengths, starts, *state = ctx.saved_tensors
        dq_THD, *_ = fused_attn_bwd(
            ctx.max_length, ctx.max_length, lengths, lengths, *qkv_T3HD.unbind(1), context_THD,
            gradients[0].contiguous(), qkv_T3HD.dtype, TE_DType[qkv_T3HD.dtype], state, _back_end(),
            deterministic=torch.are_deterministic_algorithms_enabled(), **_options(starts, ctx.p),
        )  # fmt: skip
        # in this layout the three gradients are views of one tensor that begins with dq
        dqkv_T3HD = dq_THD.as_strided(qkv_T3HD.shape, qkv_T3HD.stride())
        d_bias = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.bias
            d_bias = dqkv_T3HD.sum(0, dtype=torch.float32).to(dtype).view(shape)
        return dqkv_T3HD, d_bias, None, None, None


def _back_end() -> Any:
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    return FusedAttnBackend["F16_arbitrary_seqlen"]


def _options(starts: Tensor, p: float) -> dict[str, Any]:
    return {
        "cu_seqlens_q_padded": starts,
        "cu_seqlens_kv_padded": starts,
        "dropout": p,
        "qkv_layout": "t3hd",
        "attn_mask_type": "padding",
        "cuda_graph": torch.cuda.is_current_stream_capturing(),
    }


def _bounds(starts_S: Tensor, lengths_S: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the cumulative lengths and the first tokens of the sequences, int32 (S + 1,) each.

    Absent sequences and the last element start at ``tokens``.
    """
    sums = torch.zeros(len(lengths_S) + 1, dtype=torch.int32, device=lengths_S.device)
    torch.cumsum(lengths_S, 0, dtype=torch.int32, out=sums[1:])
    firsts = torch.where(lengths_S > 0, starts_S, tokens).int()
    return sums, F.pad(firsts, (0, 1), value=tokens)


def attention(
    qkv_T3HD: Tensor,
    starts_S: Tensor,
    lengths_S: Tensor,
    max_length: int,
    dropout: DropoutMask,
    bias_3HD: Tensor | None = None,
    *,
    handover: Handover | None = None,
) -> Tensor:
    """Return the context (T, H, D); see :func:`common.ops.attention.reference.attention_reference`.

    Args:
        qkv_T3HD: fp16 or bf16.
        dropout: dropout of the probabilities; seed and site are ignored.
        bias_3HD: its gradient takes a pass over the gradient of ``qkv_T3HD``.
        handover: ignored, because the library writes 16-bit gradients.
    """
    bounds = _bounds(starts_S, lengths_S, len(qkv_T3HD))
    result: Tensor = _TeAttention.apply(qkv_T3HD, bias_3HD, bounds, max_length, dropout.p)
    return result
