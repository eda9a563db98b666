"""Helpers of operations with Triton kernels: checks of device, dtype, sizes and layout, and numbers of programs."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from common.ops.libraries import TRITON
from common.ops.operation import Implementation, OperationRequest

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
FLOATS = tuple(NAMES)
HALVES = FLOATS[:2]


def no_triton(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on ``device``, or None. TRITON_INTERPRET=1 runs kernels on a CPU."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a Triton kernel needs a GPU, not {device.type}"
    return TRITON.unavailable()


def triton_unsupported(request: OperationRequest) -> str | None:
    """Return why our Triton kernels, whose arithmetic is fp32, cannot serve ``request``, or None if they may."""
    return _refusal(request, {}, {}, FLOATS)


def triton_kernels(
    source: str,
    *,
    most: Mapping[str, int] | None = None,
    multiple_of: Mapping[str, int] | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
) -> Implementation:
    """Declare an implementation with Triton kernels.

    Args:
        most: largest supported value of a size, by name.
        multiple_of: number that must divide a size, by name.
        dtypes: supported dtypes of the activations; empty for all.
    """
    return Implementation(
        source, functools.partial(_refusal, most=most or {}, multiple_of=multiple_of or {}, dtypes=dtypes)
    )


def _refusal(
    request: OperationRequest, most: Mapping[str, int], multiple_of: Mapping[str, int], dtypes: Sequence[torch.dtype]
) -> str | None:
    for name, limit in most.items():
        if request.sizes[name] > limit:
            return f"{name} is at most {limit}, not {request.sizes[name]}"
    for name, divisor in multiple_of.items():
        if request.sizes[name] % divisor:
            return f"{name} is a multiple of {divisor}, not {request.sizes[name]}"
    if dtypes and request.dtype not in dtypes:
        *others, last = (NAMES[dtype] for dtype in dtypes)
        return f"activations are {', '.join(others)} or {last}, not {request.dtype}"
    return no_triton(request.device)


def widen(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of the arithmetic: fp64 unchanged, all others as fp32."""
    return x if x.dtype == torch.float64 else x.float()


def programs_for(tiles: int, per_multiprocessor: int, device: torch.device, shares: int = 1) -> int:
    """Return how many programs of a launch take ``tiles`` tiles in turn.

    Args:
        per_multiprocessor: limit of programs per multiprocessor, see :class:`common.ops.tile.Tile`; 0 for one program
            per tile.
        shares: number of such sets of tiles in the launch, which share the multiprocessors.
    """
    if not per_multiprocessor:
        return tiles
    return min(tiles, max(1, multiprocessors(device) * per_multiprocessor // shares))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for the CPU, where Triton interprets kernels."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def require_contiguous(**tensors: Tensor | None) -> None:
    """Check that tensors are contiguous, because kernels do not read strides.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, not {tuple(tensor.shape)} with strides {tensor.stride()}")
