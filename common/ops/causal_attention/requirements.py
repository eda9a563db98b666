"""Checks whether libraries support a request with the size ``head_size``: the reason why not, or None if they do."""

from __future__ import annotations

import torch

from common.ops.libraries import CUDNN_FRONTEND, FLASH_ATTENTION_4, TRANSFORMER_ENGINE
from common.ops.operation import OperationRequest


def library_unsupported(request: OperationRequest, name: str, capability: tuple[int, int]) -> str | None:
    """Check common requirements: a GPU with at least ``capability``, 16-bit activations, a head size up to 128."""
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


def cudnn_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of cuDNN's attention in PyTorch."""
    reason = library_unsupported(request, "cuDNN's attention", (8, 0))
    if reason is None and not torch.backends.cudnn.is_available():
        return "PyTorch has no cuDNN"
    return reason


def flash_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of FlashAttention 2 in PyTorch."""
    reason = library_unsupported(request, "FlashAttention", (8, 0))
    if reason is None and not torch.backends.cuda.is_flash_attention_available():
        return "PyTorch was built without FlashAttention"
    return reason


def frontend_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of cuDNN's attention through ``nvidia-cudnn-frontend``."""
    return library_unsupported(request, "cuDNN's attention", (8, 0)) or CUDNN_FRONTEND.unavailable()


def te_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of attention in Transformer Engine."""
    reason = library_unsupported(request, "Transformer Engine's attention", (8, 0))
    return reason or TRANSFORMER_ENGINE.unavailable()


def flash_4_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of FlashAttention 4."""
    reason = library_unsupported(request, "FlashAttention 4", (9, 0))
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(request.device) >= (12, 0):
        return "FlashAttention 4 is used here on Hopper and on data centers' Blackwell alone"
    return FLASH_ATTENTION_4.unavailable()
