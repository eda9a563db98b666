"""Self-attention within sequences that lie anywhere in one flat buffer of tokens.

``softmax(q k^T / sqrt(D))`` of every sequence and head, dropout on the probabilities, times v. A token attends to the
tokens of its own sequence only; rows of the buffer that belong to no sequence are zero, outputs and gradients, whatever
the buffer holds there. The dropout mask's element of (query token t of the buffer, head h, key column j inside the
sequence) has index (t * H + h) * max_length + j; see :mod:`common.ops.dropout`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.attention.plain import HEAD_DIMS, attention_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.triton_support import triton_unsupported


def _attention_triton(*args: Any) -> Tensor:
    from common.ops.attention.triton import attention  # triton is imported only where it is used

    return attention(*args)


def _unsupported(request: OperationRequest) -> str | None:
    if request.sizes["head_dim"] not in HEAD_DIMS:
        return f"the head dimension is one of {HEAD_DIMS}, not {request.sizes['head_dim']}"
    return triton_unsupported(request)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _attention_triton, _unsupported),
    "torch": Implementation("torch", attention_torch, always),
}
"""Signature: ``attention(qkv_T3HD, starts_S, lengths_S, max_length, dropout, bias_3HD=None)``.

A request says ``head_dim``.
"""

KERNEL_NAMES = (("attention", r"^attention_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
