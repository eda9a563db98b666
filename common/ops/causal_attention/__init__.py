"""Dense causal attention of grouped queries: ``softmax(scale q k^T + mask) v``, without dropout and without packing.

K heads of keys and values serve H heads of queries, H / K neighbours each (Ainslie et al., arXiv:2305.13245). There may
be more keys than queries: the queries are then the last of the keys' positions, so query i of Sq sees keys
0 ... Sk - Sq + i, as a part of a row does whose earlier keys are gathered from other ranks. The pair of functions works
without autograd: the caller keeps :class:`Saved`, whose q, k and v it may drop and compute again.

The libraries are called by the name of their operator, so that none silently takes the place of another. Those in
PyTorch know the mask of a square only: what comes before is attended to without one, and the parts merge by
log-sum-exp.
"""

from __future__ import annotations

import importlib.metadata

import torch

from common.ops.causal_attention import cudnn, cudnn_frontend, flash, flash_attention_4, te
from common.ops.causal_attention.parts import Saved, merge, through
from common.ops.causal_attention.plain import CausalAttention, backward_torch, forward_torch
from common.ops.implementation import Implementation, OperationRequest, always
from common.ops.libraries import CUDNN_FRONTEND, FLASH_ATTENTION_4, missing, no_transformer_engine

__all__ = ["IMPLEMENTATIONS", "KERNEL_NAMES", "Saved", "merge"]


def _library_unsupported(request: OperationRequest, name: str, capability: tuple[int, int]) -> str | None:
    if request.device.type != "cuda":
        return f"{name} needs a CUDA device, not {request.device.type}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"{name} takes fp16 and bf16, not {request.dtype}"
    size = request.sizes["head_size"]
    if size % 8 or size > 128:
        return f"the head size is a multiple of 8 up to 128, not {size}"
    if torch.cuda.get_device_capability(request.device) < capability:
        return f"{name} needs compute capability {capability[0]}.{capability[1]}"
    return None


def _cudnn_unsupported(request: OperationRequest) -> str | None:
    reason = _library_unsupported(request, "cuDNN's attention", (8, 0))
    if reason is None and not torch.backends.cudnn.is_available():
        return "PyTorch has no cuDNN"
    return reason


def _flash_unsupported(request: OperationRequest) -> str | None:
    reason = _library_unsupported(request, "FlashAttention", (8, 0))
    if reason is None and not torch.backends.cuda.is_flash_attention_available():
        return "PyTorch was built without FlashAttention"
    return reason


def _frontend_unsupported(request: OperationRequest) -> str | None:
    return _library_unsupported(request, "cuDNN's attention", (8, 0)) or missing(CUDNN_FRONTEND)


def _te_unsupported(request: OperationRequest) -> str | None:
    return _library_unsupported(request, "Transformer Engine's attention", (8, 0)) or no_transformer_engine()


def _flash_4_unsupported(request: OperationRequest) -> str | None:
    reason = _library_unsupported(request, "FlashAttention 4", (9, 0)) or missing(FLASH_ATTENTION_4)
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(request.device) >= (12, 0):
        return "FlashAttention 4 is used here on Hopper and on data centers' Blackwell alone"
    installed, known = importlib.metadata.version(FLASH_ATTENTION_4), flash_attention_4.VERSION
    return (
        None if installed == known else f"{FLASH_ATTENTION_4} {installed} is installed, {known} is what is known here"
    )


IMPLEMENTATIONS = {
    "flash_attention_4": Implementation("flash_attention_4", through(flash_attention_4.LIBRARY), _flash_4_unsupported),
    "cudnn": Implementation("cudnn", through(cudnn.LIBRARY), _cudnn_unsupported),
    "flash": Implementation("flash", through(flash.LIBRARY), _flash_unsupported),
    "cudnn_frontend": Implementation("cudnn_frontend", through(cudnn_frontend.LIBRARY), _frontend_unsupported),
    "te": Implementation("te", through(te.LIBRARY), _te_unsupported),
    "torch": Implementation("torch", CausalAttention(forward_torch, backward_torch), always),
}
"""Functions: :class:`CausalAttention`. A request says ``head_size``."""

KERNEL_NAMES = (("attention", r"cudnn.*(sdpa|fmha|flash)|(flash|pytorch_flash).*(fwd|bwd)|sdpa_sm"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
