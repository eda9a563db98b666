"""FlashAttention 4, kernels in CuTe's Python language for Hopper and Blackwell (``flash-attn-4``).

It supports grouped queries, and aligns its mask to the last key. Its functions without autograd are private, so we use
exactly one version, which ``pyproject.toml`` and :mod:`common.ops.libraries` name. The first use of a dtype, head size
and mask compiles kernels and waits for the device, so it must happen before the capture of a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.causal_attention.parts import Library
from common.ops.causal_attention.reference import Saved


def forward(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, None]:
    """See :class:`common.ops.causal_attention.parts.Forward`."""
    from flash_attn.cute.interface import _flash_attn_fwd

    o, lse, *_ = _flash_attn_fwd(q_BQHD, k_BSKD, v_BSKD, softmax_scale=scale, causal=causal, return_lse=True)
    return o, lse, None


def backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`common.ops.causal_attention.parts.Backward`."""
    dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
    backward_into(do_BQHD, saved, causal, (dq, dk, dv))
    return dq, dk, dv


def backward_into(do_BQHD: Tensor, saved: Saved, causal: bool, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """See :class:`common.ops.causal_attention.parts.BackwardInto`."""
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = gradients
    _flash_attn_bwd(
        *saved[:4], do_BQHD, saved.lse, saved.scale, causal,
        deterministic=torch.are_deterministic_algorithms_enabled(), dq=dq, dk=dk, dv=dv,
    )  # fmt: skip


LIBRARY = Library(forward, backward, prefixes=True, into=backward_into)
