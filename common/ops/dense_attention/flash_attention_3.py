"""FlashAttention 3, kernels for Hopper (Shah et al., arXiv:2407.08608), where ``flash_attn_3`` is installed.

Its operators are called by name. They write gradients where they are told to. A package may have been built without a
backward pass or without a head size: its module ``flash_attn_config`` says so.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from common.ops.causal_attention.parts import Library
from common.ops.causal_attention.reference import Saved
from common.ops.causal_attention.requirements import library_unsupported
from common.ops.libraries import FLASH_ATTENTION_3
from common.ops.operation import OperationRequest

_SIZES = (64, 96, 128)
"""Head sizes that have kernels of their own; others are padded to the next."""


def unsupported(request: OperationRequest) -> str | None:
    """Why it cannot serve a request, which says ``head_size``; None where it can."""
    reason = library_unsupported(request, "FlashAttention 3", (9, 0))
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(request.device)[0] != 9:
        return "FlashAttention 3 is used here on Hopper alone"
    reason = FLASH_ATTENTION_3.unavailable()
    if reason is not None:
        return reason
    flags = importlib.import_module("flash_attn_config").CONFIG.get("build_flags")
    if flags is None:
        return f"{FLASH_ATTENTION_3.name} does not say how it was built"
    size = next(size for size in _SIZES if request.sizes["head_size"] <= size)
    kind = {torch.float16: "FP16"}.get(request.dtype)
    for flag in ("BACKWARD", f"HDIM{size}", *([kind] if kind else [])):
        if flags.get(f"FLASHATTENTION_DISABLE_{flag}", False):
            return f"{FLASH_ATTENTION_3.name} was built without {flag}"
    return None


def _operators() -> Any:
    importlib.import_module("flash_attn_3._C")  # registers them
    return torch.ops.flash_attn_3


def forward(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, None]:
    """See :class:`common.ops.causal_attention.parts.Forward`."""
    o, lse, *_ = _operators().fwd(q_BQHD, k_BSKD, v_BSKD, softmax_scale=scale, is_causal=causal, num_splits=1)
    return o, lse, None


def backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`common.ops.causal_attention.parts.Backward`."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[:3])
    backward_into(do_BQHD, saved, causal, (dq, dk, dv))
    return dq, dk, dv


def backward_into(do_BQHD: Tensor, saved: Saved, causal: bool, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """See :class:`common.ops.causal_attention.parts.BackwardInto`."""
    dq, dk, dv = gradients
    _operators().bwd(
        do_BQHD, *saved[:4], saved.lse, dq=dq, dk=dk, dv=dv, softmax_scale=saved.scale, is_causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


LIBRARY = Library(forward, backward, prefixes=True, into=backward_into)
