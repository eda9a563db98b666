"""Attention of every query to every key, ``softmax(q k^T / sqrt(D)) v``, without mask, dropout and grouped queries.

Implementations are :class:`Attention` objects. A call takes q (B, S, H, D), k and v (B, T, H, D) and returns
(B, S, H, D). The method ``packed`` takes all three as one tensor (B, S, 3, H, D) and returns their gradient as one
tensor. Inputs may be views of larger tensors; only the last dimension must be contiguous.

Each implementation calls the operator of its library by name, so that neither PyTorch nor the cache of a compiler can
choose another. The libraries are those of :mod:`common.ops.causal_attention`, in order of their speed on an H200 with
head size 64. Forward and backward with 32 rows of 4,096 tokens and 5 heads, and with 77 keys:

- FlashAttention 4: 542 and 557 TFLOP/s; with 77 keys 0.133 and 0.342 ms;
- cuDNN: 482 and 464 TFLOP/s; with 77 keys 0.097 and 0.408 ms;
- FlashAttention 2: 309 and 278 TFLOP/s.

cuDNN's frontend runs the same kernels as PyTorch's operators but writes packed gradients in place: backward takes
3.72 ms instead of 3.81 at 4,096 tokens, 0.60 instead of 0.66 at 1,024 tokens and 10 heads, and 0.148 instead of 0.178
at 256 tokens and 20 heads; otherwise they are equal. FlashAttention 4 writes in place, too.
"""

from __future__ import annotations

import torch

from common.ops.causal_attention import CAUSAL_ATTENTION, cudnn, cudnn_frontend, flash, flash_attention_4, requirements
from common.ops.dense_attention.library import LibraryAttention
from common.ops.dense_attention.reference import Attention, ReferenceAttention
from common.ops.operation import Implementation, Operation, OperationRequest

__all__ = ["DENSE_ATTENTION", "Attention"]

ANY_LENGTH = 90000
"""First version of cuDNN that does not need multiples of 64 queries and keys (from the version checks of its SDPA)."""

_MULTIPLE = 64


def _cudnn_unsupported(request: OperationRequest) -> str | None:
    reason = requirements.cudnn_unsupported(request)
    version = torch.backends.cudnn.version()
    if reason is not None or version is None or version >= ANY_LENGTH:
        return reason
    for name in ("queries", "keys"):
        if request.sizes[name] % _MULTIPLE:
            return f"cuDNN {version} takes multiples of {_MULTIPLE} {name}, not {request.sizes[name]}"
    return None


DENSE_ATTENTION = Operation(
    "dense_attention",
    ReferenceAttention(),
    {
        "flash_attention_4": Implementation(
            LibraryAttention(flash_attention_4.LIBRARY), requirements.flash_4_unsupported
        ),
        "cudnn_frontend": Implementation(LibraryAttention(cudnn_frontend.LIBRARY), requirements.frontend_unsupported),
        "cudnn": Implementation(LibraryAttention(cudnn.LIBRARY), _cudnn_unsupported),
        "flash": Implementation(LibraryAttention(flash.LIBRARY), requirements.flash_unsupported),
    },
    kernel_names=CAUSAL_ATTENTION.kernel_names,
    cases="common.ops.dense_attention.cases",
)
"""Function: an :class:`Attention`. Sizes of a request: ``head_size``, ``queries`` and ``keys``."""
