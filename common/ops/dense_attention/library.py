"""Attention with autograd, by the functions of a library without a mask.

All tensors are (B, S, H, D) in memory. The gradient of the context is made contiguous, because cuDNN's operator would
copy it otherwise; after a linear layer it already is. Everything is enqueued on the current stream and nothing waits
for the device. Shapes: B rows, S queries and T keys per row, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.causal_attention.parts import Library, Saved
from common.ops.dense_attention.reference import check, check_packed

_EVERY_KEY = False  # the argument ``causal`` of the functions


class LibraryAttention:
    """An :class:`common.ops.dense_attention.reference.Attention` that calls a library."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        """See :class:`common.ops.dense_attention.reference.Attention`."""
        check(q_BSHD, k_BTHD, v_BTHD)
        o_BSHD: Tensor = _Separate.apply(self._library, q_BSHD, k_BTHD, v_BTHD)
        return o_BSHD

    def packed(self, qkv_BS3HD: Tensor) -> Tensor:
        """See :class:`common.ops.dense_attention.reference.Attention`.

        A library with ``into`` writes the gradients into one tensor. PyTorch's operators return three tensors, which
        another pass joins.
        """
        check_packed(qkv_BS3HD)
        o_BSHD: Tensor = _Packed.apply(self._library, qkv_BS3HD)
        return o_BSHD


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: Library, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        return _forward(ctx, library, (q_BSHD, k_BTHD, v_BTHD), q_BSHD, k_BTHD, v_BTHD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o_BSHD, lse_BHS = ctx.saved_tensors
        saved = Saved(q, k, v, o_BSHD, lse_BHS, ctx.scale, ctx.state)
        return None, *ctx.library.backward(gradients[0].contiguous(), saved, _EVERY_KEY)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: Library, qkv_BS3HD: Tensor) -> Tensor:
        return _forward(ctx, library, (qkv_BS3HD,), *qkv_BS3HD.unbind(2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkv_BS3HD, o_BSHD, lse_BHS = ctx.saved_tensors
        q, k, v = qkv_BS3HD.unbind(2)
        saved = Saved(q, k, v, o_BSHD, lse_BHS, ctx.scale, ctx.state)
        do_BSHD, library = gradients[0].contiguous(), ctx.library
        if library.into is None:
            return None, torch.stack(library.backward(do_BSHD, saved, _EVERY_KEY), 2)
        dqkv_BS3HD = torch.empty_like(qkv_BS3HD, memory_format=torch.contiguous_format)
        library.into(do_BSHD, saved, _EVERY_KEY, dqkv_BS3HD.unbind(2))
        return None, dqkv_BS3HD


def _forward(
    ctx: Any, library: Library, kept: tuple[Tensor, ...], q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor
) -> Tensor:
    ctx.library, ctx.scale = library, q_BSHD.shape[-1] ** -0.5
    o_BSHD, lse_BHS, ctx.state = library.forward(q_BSHD, k_BTHD, v_BTHD, ctx.scale, _EVERY_KEY)
    o_BSHD = o_BSHD.contiguous()
    ctx.save_for_backward(*kept, o_BSHD, lse_BHS)
    return o_BSHD
