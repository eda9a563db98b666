"""Self-attention within sequences that are packed into one flat buffer of tokens, at any positions.

``dropout(softmax(q k^T / sqrt(D))) v`` for every sequence and head. A token attends to the tokens of its own sequence.
Rows of the buffer outside all sequences may hold any values; their outputs and gradients are zero. The dropout mask has
the index (t * H + h) * max_length + j for query token t of the buffer, head h and key column j of the sequence, see
:mod:`common.ops.dropout`. Transformer Engine draws other masks.

If the projection to queries, keys and values runs in FP8, the kernels write their gradients in FP8, with one delayed
scale (:mod:`common.ops.fp8_cast`) and without a transpose. The first scale comes from the gradient of the context.
"""

from __future__ import annotations

import torch

from common.ops.attention import te
from common.ops.attention.reference import HEAD_DIMS, attention_reference
from common.ops.libraries import TRANSFORMER_ENGINE
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["head_dim"] not in HEAD_DIMS:
        return f"the head dimension is one of {HEAD_DIMS}, not {request.sizes['head_dim']}"
    return triton_unsupported(request)


def _te_unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"Transformer Engine needs a CUDA device, not {request.device.type}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"Transformer Engine's attention takes fp16 and bf16, not {request.dtype}"
    if request.sizes["head_dim"] % 8 or request.sizes["head_dim"] > 128:
        return f"the head dimension is a multiple of 8 up to 128, not {request.sizes['head_dim']}"
    if torch.cuda.get_device_capability(request.device) < (9, 0):
        return "Transformer Engine's attention within packs needs compute capability 9.0"
    return TRANSFORMER_ENGINE.unavailable()


ATTENTION = Operation(
    "attention",
    attention_reference,
    {
        "triton": Implementation("common.ops.attention.triton:attention", _unsupported),
        "te": Implementation(te.attention, _te_unsupported),
    },
    kernel_names=(("attention", r"^attention_|cu_seqlens"),),
    cases="common.ops.attention.cases",
)
"""Signature: ``attention(qkv_T3HD, starts_S, lengths_S, max_length, dropout, bias_3HD=None, *,
handover=None)``.

Size of a request: ``head_dim``.
"""
