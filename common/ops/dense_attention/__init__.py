"""Attention of every query to every key, ``softmax(q k^T / sqrt(D)) v``, without mask, dropout and grouped queries.

Implementations are :class:`Attention` objects: a function of queries, keys and values, and the method ``packed``, which
takes all three as one tensor and returns their gradient as one tensor. Inputs may be views of larger tensors whose last
dimension is contiguous.

Each implementation calls the operator of its library by name, so that neither PyTorch nor the cache of a compiler can
choose another. The libraries are those of :mod:`common.ops.causal_attention`, in order of their speed on an H200 with
head size 64. ForwardCall and backward with 32 rows of 4,096 tokens and 5 heads, and with 77 keys:

- FlashAttention 4: 542 and 557 TFLOP/s; with 77 keys 0.133 and 0.342 ms;
- cuDNN: 482 and 464 TFLOP/s; with 77 keys 0.097 and 0.408 ms;
- FlashAttention 2: 309 and 278 TFLOP/s.

cuDNN's frontend runs the same kernels as PyTorch's operators but writes packed gradients in place: backward takes
3.72 ms instead of 3.81 at 4,096 tokens, 0.60 instead of 0.66 at 1,024 tokens and 10 heads, and 0.148 instead of 0.178
at 256 tokens and 20 heads; otherwise they are equal. FlashAttention 4 writes in place, too.

Shapes: B rows, S queries and T keys per row, H heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.causal_attention import CAUSAL_ATTENTION, cudnn_frontend, libraries
from common.ops.causal_attention.parts import Library, Saved
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import widen


class Attention(Protocol):
    """Interface of an implementation."""

    def __call__(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        """Return the attention of queries to keys: (B, S, H, D), contiguous. All tensors have one dtype.

        Raises:
            ValueError: the shapes are inconsistent.
        """

    def packed(self, qkv_BS3HD: Tensor) -> Tensor:
        """Return the same for queries, keys and values in one tensor, in this order.

        Raises:
            ValueError: the shape is not (B, S, 3, H, D).
        """


class ReferenceAttention:
    """Attention in fp32, or fp64 for fp64 inputs. It stores B * H * S * T probabilities."""

    def __call__(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        check(q_BSHD, k_BTHD, v_BTHD)
        q_BHSD, k_BHTD, v_BHTD = (widen(x).transpose(1, 2) for x in (q_BSHD, k_BTHD, v_BTHD))
        scores_BHST = (q_BHSD * q_BHSD.shape[-1] ** -0.5) @ k_BHTD.transpose(2, 3)
        o_BSHD = (scores_BHST.softmax(-1) @ v_BHTD).transpose(1, 2)
        return o_BSHD.to(q_BSHD.dtype).contiguous()

    def packed(self, qkv_BS3HD: Tensor) -> Tensor:
        check_packed(qkv_BS3HD)
        return self(*qkv_BS3HD.unbind(2))


def check(q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
    """Check the shapes of queries, keys and values.

    Raises:
        ValueError: rows, heads or head sizes differ, or the shapes of keys and values.
    """
    q, k, v = (tuple(x.shape) for x in (q_BSHD, k_BTHD, v_BTHD))
    if len(q) != 4 or k != v or (q[0], *q[2:]) != (k[0], *k[2:]):
        raise ValueError(f"attention of queries {q}, keys {k} and values {v}, (rows, length, heads, size) each")


def check_packed(qkv_BS3HD: Tensor) -> None:
    """Check the shape of packed queries, keys and values.

    Raises:
        ValueError: the shape is not (B, S, 3, H, D).
    """
    if qkv_BS3HD.dim() != 5 or qkv_BS3HD.shape[2] != 3:
        shape = tuple(qkv_BS3HD.shape)
        raise ValueError(f"queries, keys and values of shape {shape}, not (rows, length, 3, heads, size)")


_EVERY_KEY = False  # the argument ``causal`` of the functions


class LibraryAttention:
    """An :class:`Attention` with autograd that calls a library of :mod:`common.ops.causal_attention`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        check(q_BSHD, k_BTHD, v_BTHD)
        o_BSHD: Tensor = _Separate.apply(self._library, q_BSHD, k_BTHD, v_BTHD)
        return o_BSHD

    def packed(self, qkv_BS3HD: Tensor) -> Tensor:
        """Return the context (B, S, H, D); see :meth:`Attention.packed`.

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
        # contiguous, because cuDNN's operator would copy it otherwise; after a linear layer it already is
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


ANY_LENGTH = 90000
"""First version of cuDNN that does not need multiples of 64 queries and keys (from the version checks of its SDPA)."""

_MULTIPLE = 64


def _cudnn_unsupported(request: OperationRequest) -> str | None:
    reason = libraries.cudnn_unsupported(request)
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
        "flash_attention_4": Implementation(LibraryAttention(libraries.FLASH_4), libraries.flash_4_unsupported),
        "cudnn_frontend": Implementation(LibraryAttention(cudnn_frontend.LIBRARY), libraries.frontend_unsupported),
        "cudnn": Implementation(LibraryAttention(libraries.CUDNN), _cudnn_unsupported),
        "flash": Implementation(LibraryAttention(libraries.FLASH), libraries.flash_unsupported),
    },
    kernel_names=CAUSAL_ATTENTION.kernel_names,
    cases="common.ops.dense_attention.cases",
)
"""Function: an :class:`Attention`. Sizes of a request: ``head_size``, ``queries`` and ``keys``."""
