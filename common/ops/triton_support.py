"""What every operation with a Triton kernel needs to know: whether one can run, and how many programs fill the GPU."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from common.ops.implementation import OperationRequest
from common.ops.libraries import TRITON


def no_triton(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on ``device``, or None. TRITON_INTERPRET=1 runs kernels on a CPU."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a Triton kernel needs a GPU, not {device.type}"
    return TRITON.unavailable()


def triton_unsupported(request: OperationRequest) -> str | None:
    """Why no Triton kernel of ours, whose arithmetic is fp32, can serve ``request``; None if one may."""
    if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"activations are fp16, bf16 or fp32, not {request.dtype}"
    return no_triton(request.device)


def widen(x: Tensor) -> Tensor:
    """``x`` in the dtype of the arithmetic: fp64 as it is, all else in fp32."""
    return x if x.dtype == torch.float64 else x.float()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def require_contiguous(**tensors: Tensor | None) -> None:
    """Refuse tensors that a kernel would misread.

    Raises:
        ValueError: one isn't contiguous.
    """
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, not {tuple(tensor.shape)} with strides {tensor.stride()}")
