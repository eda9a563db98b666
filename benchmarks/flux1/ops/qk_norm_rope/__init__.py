"""Queries, keys and values of joint attention: RMSNorm of each head, rotary positions, and the split of the product.

RMSNorm of queries and keys: ``x weight / sqrt(mean(x^2) + epsilon)`` over the features of a head (Zhang, Sennrich,
arXiv:1910.07467; for attention Dehghani et al., arXiv:2302.05442). Rotary positions: Su et al., arXiv:2104.09864;
dimensions 2i and 2i + 1 form a pair. :mod:`common.ops.rope` pairs the halves of a head and has no norms.

Joint attention reads the tokens of several streams, each with its own product ``q | k | v``, bias and norm weights. One
pass over each product adds the bias, normalises, rotates, and writes its tokens into the joined tensors. Arithmetic is
in fp32. If a product's backward pass is in FP8, the kernels write its gradient only in FP8, with a delayed scale
(:mod:`common.ops.fp8_cast`).

Shapes: N samples, L tokens of a sample in all streams, H heads, D head size. A stream has R rows (its tokens of all
samples, sample by sample) of F = 3 H D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import Handover, widened
from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.triton_support import triton_unsupported, widen


class QkvStream(NamedTuple):
    """Tokens with their own projection.

    Attributes:
        qkv: (R, F), product without bias: queries of all heads, then keys, then values.
        bias: (F,).
        q_weight, k_weight: (D,), weights of the norms.
        tokens: tokens of a sample.
        handover: receives the gradient of ``qkv`` in e5m2 if it has a scale.
    """

    qkv: Tensor
    bias: Tensor
    q_weight: Tensor
    k_weight: Tensor
    tokens: int
    handover: Handover | None = None


def qk_norm_rope_reference(
    streams: Sequence[QkvStream], cos_LD2: Tensor, sin_LD2: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, (N, L, H, D) each, contiguous, in the dtype of the products.

    Args:
        streams: joined along L in this order.
        cos_LD2, sin_LD2: cosines and sines of the angles, fp32 (L, D / 2).
        epsilon: constant that is added to the mean square.
    """
    joined: tuple[list[Tensor], ...] = ([], [], [])
    first = 0
    for stream in streams:
        own, size = slice(first, first + stream.tokens), len(stream.q_weight)
        sum_RF = widened(stream.qkv, stream.handover) + widen(stream.bias)
        q_NLHD, k_NLHD, v_NLHD = sum_RF.view(-1, stream.tokens, 3, sum_RF.shape[1] // (3 * size), size).unbind(2)
        angles = cos_LD2[own].unsqueeze(1), sin_LD2[own].unsqueeze(1)
        joined[0].append(_rotated(_normed(q_NLHD, stream.q_weight, epsilon), *angles))
        joined[1].append(_rotated(_normed(k_NLHD, stream.k_weight, epsilon), *angles))
        joined[2].append(v_NLHD)
        first += stream.tokens
    q, k, v = (torch.cat(parts, 1).to(streams[0].qkv.dtype) for parts in joined)
    return q, k, v


def _normed(x_NLHD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    return x_NLHD * (x_NLHD.square().mean(-1, keepdim=True) + epsilon).rsqrt() * widen(weight_D)


def _rotated(x_NLHD: Tensor, cos_L1D2: Tensor, sin_L1D2: Tensor) -> Tensor:
    even, odd = x_NLHD.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([even * cos_L1D2 - odd * sin_L1D2, odd * cos_L1D2 + even * sin_L1D2], -1)
    return rotated.flatten(-2)


def _triton_unsupported(request: OperationRequest) -> str | None:
    size = request.sizes["head_size"]
    if size < 2 or size & (size - 1):
        return f"head_size is a power of two, not {size}"
    return triton_unsupported(request)


QK_NORM_ROPE = Operation(
    "qk_norm_rope",
    qk_norm_rope_reference,
    {
        "triton": Implementation("benchmarks.flux1.ops.qk_norm_rope.triton:qk_norm_rope", _triton_unsupported),
    },
    kernel_names=(("norm and RoPE of queries and keys", r"^qk_norm_rope_"),),
    cases="benchmarks.flux1.ops.qk_norm_rope.cases",
)
"""Signature: that of :func:`qk_norm_rope_reference`. Size of a request: ``head_size``."""
