"""Attention functions of libraries, and the requests that each library supports.

All libraries support grouped queries: keys, values and their gradients have K heads. Those with ``prefixes`` align the
causal mask to the last key. The signatures are those of :class:`common.ops.causal_attention.parts.Library`. The
functions ``..._unsupported`` return why a library cannot serve a request with the size ``head_size``, or None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.causal_attention.parts import Library
from common.ops.causal_attention.reference import Saved
from common.ops.libraries import CUDNN_FRONTEND, FLASH_ATTENTION_4, TRANSFORMER_ENGINE
from common.ops.operation import OperationRequest

_NO_DROPOUT = 0.0


def _cudnn_forward(
    q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    q, k, v = (x.transpose(1, 2) for x in (q_BQHD, k_BSKD, v_BSKD))
    o, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, _NO_DROPOUT, causal, False, scale=scale
    )
    # in some versions of PyTorch lse has a last dimension of 1, which backward expects
    return o.transpose(1, 2), lse.view(q.shape[:3]), (seed, offset, lse.shape)


def _cudnn_backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset, lse_shape = saved.state
    do, q, k, v, o = (x.transpose(1, 2) for x in (do_BQHD, saved.q, saved.k, saved.v, saved.o))
    lse = saved.lse.contiguous().view(lse_shape)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], _NO_DROPOUT, causal,
        scale=saved.scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


CUDNN = Library(_cudnn_forward, _cudnn_backward)
"""cuDNN's attention through PyTorch's operators, which take (B, H, S, D): here transposed views of (B, S, H, D)."""


def _flash_forward(
    q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    o, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q_BQHD, k_BSKD, v_BSKD, None, None, q_BQHD.shape[1], k_BSKD.shape[1], _NO_DROPOUT, causal, False, scale=scale
    )
    return o, lse, (state, unused)


def _flash_backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    state, unused = saved.state
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        do_BQHD, saved.q, saved.k, saved.v, saved.o, saved.lse.contiguous(), None, None,
        saved.q.shape[1], saved.k.shape[1], _NO_DROPOUT, causal, state, unused, scale=saved.scale,
    )  # fmt: skip
    return dq, dk, dv


FLASH = Library(_flash_forward, _flash_backward)
"""FlashAttention 2 through PyTorch's operators (Dao, arXiv:2307.08691)."""


def _flash_4_forward(
    q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, None]:
    from flash_attn.cute.interface import _flash_attn_fwd

    o, lse, *_ = _flash_attn_fwd(q_BQHD, k_BSKD, v_BSKD, softmax_scale=scale, causal=causal, return_lse=True)
    return o, lse, None


def _flash_4_backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
    _flash_4_backward_into(do_BQHD, saved, causal, (dq, dk, dv))
    return dq, dk, dv


def _flash_4_backward_into(
    do_BQHD: Tensor, saved: Saved, causal: bool, gradients: tuple[Tensor, Tensor, Tensor]
) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = gradients
    _flash_attn_bwd(
        *saved[:4], do_BQHD, saved.lse, saved.scale, causal,
        deterministic=torch.are_deterministic_algorithms_enabled(), dq=dq, dk=dk, dv=dv,
    )  # fmt: skip


FLASH_4 = Library(_flash_4_forward, _flash_4_backward, prefixes=True, into=_flash_4_backward_into)
"""FlashAttention 4, kernels in CuTe's Python language for Hopper and Blackwell (``flash-attn-4``).

Its functions without autograd are private, so we use exactly one version, which ``pyproject.toml`` and
:mod:`common.ops.libraries` name. The first use of a dtype, head size and mask compiles kernels and waits for the
device, so it must happen before the capture of a CUDA graph.
"""


def _te_forward(
    q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_fwd

    q, k, v = (x.contiguous() for x in (q_BQHD, k_BSKD, v_BSKD))
    o, (stats, generator_state) = fused_attn_fwd(
        True, *_te_lengths(q, k), q, k, v, q.dtype, FusedAttnBackend["F16_arbitrary_seqlen"],
        attn_scale=scale, **_te_options(q, k, causal),
    )  # fmt: skip
    return o, stats.view(stats.shape[:3]), (generator_state,)


def _te_backward(do_BQHD: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_bwd

    q, k, v, o, do, stats = (x.contiguous() for x in (*saved[:4], do_BQHD, saved.lse))
    dq, dk, dv, *_ = fused_attn_bwd(
        *_te_lengths(q, k), q, k, v, o, do, q.dtype, TE_DType[q.dtype], [stats.unsqueeze(3), *saved.state],
        FusedAttnBackend["F16_arbitrary_seqlen"], attn_scale=saved.scale,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_te_options(q, k, causal),
    )  # fmt: skip
    return dq, dk, dv


def _te_lengths(q_BQHD: Tensor, k_BSKD: Tensor) -> tuple[int, int, Tensor, Tensor]:
    """Return the numbers of queries and keys per row, and the first query and key of each row, int32 (B + 1,)."""
    rows, queries, keys = q_BQHD.shape[0], q_BQHD.shape[1], k_BSKD.shape[1]
    firsts = torch.arange(rows + 1, dtype=torch.int32, device=q_BQHD.device)
    return queries, keys, firsts * queries, firsts * keys


def _te_options(q_BQHD: Tensor, k_BSKD: Tensor, causal: bool) -> dict[str, Any]:
    mask = "no_mask"
    if causal:
        mask = "causal" if q_BQHD.shape[1] == k_BSKD.shape[1] else "causal_bottom_right"
    return {
        "qkv_layout": "bshd_bshd_bshd",
        "attn_mask_type": mask,
        "window_size": (-1, 0 if causal else -1),
        "cuda_graph": torch.cuda.is_current_stream_capturing(),
    }


TE = Library(_te_forward, _te_backward, prefixes=True)
"""Transformer Engine's fused attention, through the two functions that its attention module calls.

They need contiguous tensors. Every forward pass advances PyTorch's CUDA generator, although there is no dropout.
"""


def _unsupported(request: OperationRequest, name: str, capability: tuple[int, int]) -> str | None:
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
    reason = _unsupported(request, "cuDNN's attention", (8, 0))
    if reason is None and not torch.backends.cudnn.is_available():
        return "PyTorch has no cuDNN"
    return reason


def flash_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of FlashAttention 2 in PyTorch."""
    reason = _unsupported(request, "FlashAttention", (8, 0))
    if reason is None and not torch.backends.cuda.is_flash_attention_available():
        return "PyTorch was built without FlashAttention"
    return reason


def frontend_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of cuDNN's attention through ``nvidia-cudnn-frontend``."""
    return _unsupported(request, "cuDNN's attention", (8, 0)) or CUDNN_FRONTEND.unavailable()


def te_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of attention in Transformer Engine."""
    reason = _unsupported(request, "Transformer Engine's attention", (8, 0))
    return reason or TRANSFORMER_ENGINE.unavailable()


def flash_4_unsupported(request: OperationRequest) -> str | None:
    """Check the requirements of FlashAttention 4."""
    reason = _unsupported(request, "FlashAttention 4", (9, 0))
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(request.device) >= (12, 0):
        return "FlashAttention 4 is used here on Hopper and on data centers' Blackwell alone"
    return FLASH_ATTENTION_4.unavailable()
