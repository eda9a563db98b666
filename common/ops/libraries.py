"""Optional libraries of the operations, and the cuDNN handle of each device."""

from __future__ import annotations

import functools
from typing import Any

import torch

from common.optional_packages import OptionalPackage

APEX_GROUP_NORM = OptionalPackage("apex with --group_norm", ("apex.contrib.group_norm:GroupNorm", "group_norm_cuda"))
CUDNN_FRONTEND = OptionalPackage("nvidia-cudnn-frontend", ("cudnn:create_handle", "cudnn:pygraph"))
FLASH_ATTENTION_4 = OptionalPackage(
    "flash-attn-4",
    ("flash_attn.cute.interface:_flash_attn_fwd", "flash_attn.cute.interface:_flash_attn_bwd"),
    version="4.0.0b36",  # its functions without autograd have no public name
)
TRANSFORMER_ENGINE = OptionalPackage(
    "transformer-engine",
    (
        "transformer_engine.pytorch:Float8Quantizer",
        "transformer_engine.pytorch:Float8TensorStorage",
        "transformer_engine.pytorch.constants:TE_DType",
        "transformer_engine.pytorch.constants:tex",
        "transformer_engine.pytorch.cpp_extensions:general_gemm",
        "transformer_engine.pytorch.cpp_extensions.fused_attn:fused_attn_fwd",
    ),
)
TRITON = OptionalPackage("triton", ("triton:jit", "triton.language"))


@functools.cache
def _cudnn_handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


def cudnn_handle(device: torch.device) -> Any:
    """Return the cuDNN handle that this process uses for a device, set to the current stream of the device."""
    import cudnn

    handle = _cudnn_handle(device)
    cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    return handle
