"""Attention of every query to every key, ``softmax(q k^T / sqrt(D)) v``: no mask, no dropout, as many heads of keys as
of queries, any number of keys.

``function`` is an :class:`Attention`: called with q (B, S, H, D), k and v (B, T, H, D) it returns (B, S, H, D), and its
``packed`` takes the three as one product gives them, (B, S, 3, H, D), whose gradient it returns as one tensor too. They
may be views of wider rows; only the last dimension is contiguous.

Libraries are called by the name of their operators, so that none silently takes the place of another, and so that a
compiler's cache, which does not see what is preferred within a context, cannot mix them up. They share the pairs of
functions of :mod:`common.ops.causal_attention`. In order of what was measured on an H200 at a head size of 64:
FlashAttention 4 has 542 and 557 TFLOP/s forward and backward at 32 rows of 4,096 tokens and 5 heads, cuDNN 482 and 464,
FlashAttention 2 309 and 278; to 77 keys FlashAttention 4 takes 0.133 and 0.342 ms, cuDNN 0.097 and 0.408. cuDNN
through its own frontend is ahead of PyTorch's operators: the same kernels, but a packed gradient is
written in place, so that a backward pass takes 3.72 ms instead of 3.81 there, 0.60 instead of 0.66 at 1,024 tokens and
10 heads, and 0.148 instead of 0.178 at 256 and 20; forward, and with 77 keys, they are equal. It needs a package more.
FlashAttention 4 writes in place too.
"""

from __future__ import annotations

import torch

from common.ops.causal_attention import CAUSAL_ATTENTION, cudnn, cudnn_frontend, flash, flash_attention_4, requirements
from common.ops.dense_attention.library import LibraryAttention
from common.ops.dense_attention.reference import Attention, ReferenceAttention
from common.ops.operation import Implementation, Operation, OperationRequest

__all__ = ["DENSE_ATTENTION", "Attention"]

ANY_LENGTH = 90000
"""Version of cuDNN from which numbers of queries and keys need not be multiples of 64 (its SDPA's version checks)."""

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
"""Functions: :class:`Attention`. A request says ``head_size``, ``queries`` and ``keys``."""
