"""Rotary positions of queries and keys, and the split of their fused product; the gradient can be in FP8.

Su et al., arXiv:2104.09864, section 3.4.2. Dimensions i and i + D/2 form a pair (GPT-NeoX, Llama), which is rotated by
``position * base^(-2i / D)``. One pass splits a product ``q | k | v`` into contiguous tensors and rotates q and k. The
backward pass rotates their gradients back and joins them. The functions work without autograd, and the caller keeps
only the tables. FP8 results are rounded from fp32, with a delayed scale (:mod:`common.ops.fp8_cast`).

Shapes: T tokens, H query heads, K key and value heads, D head size, N = (H + 2K) D columns of the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import E5M2, Fp8Tensor, Scaling, computed_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


class Rope(NamedTuple):
    """Functions of an implementation; see :func:`forward_reference` and :func:`backward_reference`."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor | None, Fp8Tensor | None]]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies as in Llama 3.1, for longer sequences than in its first training.

    A dimension makes some number of turns over the original context. Below ``slow_turns`` it becomes ``factor`` times
    slower, above ``fast_turns`` it stays unchanged, and in between the frequency is interpolated linearly in the
    number of turns (Meta's reference implementation of Llama 3.1, ``apply_scaling``; Hugging Face's rope type
    ``llama3``).

    Attributes:
        factor: divisor of slow frequencies.
        slow_turns, fast_turns: turns over the original context; Hugging Face's low and high frequency factors.
        original_context: tokens.
    """

    factor: float
    slow_turns: float
    fast_turns: float
    original_context: int

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per token like ``frequencies``."""
        turns = frequencies * (self.original_context / (2.0 * math.pi))
        kept = ((turns - self.slow_turns) / (self.fast_turns - self.slow_turns)).clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


def tables(
    positions_T: Tensor, head_size: int, base: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all angles, fp32 (T, D / 2) each. They are computed in fp64.

    Args:
        positions_T: integer position of each of the rank's tokens in its sequence.
        head_size: D, even.
        base: base of the frequencies, 10,000 in the paper.
        scaling: scaling of the frequencies; None for none.

    Raises:
        ValueError: ``head_size`` is odd.
    """
    if head_size % 2:
        raise ValueError(f"rotary positions turn pairs of dimensions: a head of {head_size} has none for the last")
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=positions_T.device) / head_size
    frequencies = torch.pow(base, -exponents)
    if scaling is not None:
        frequencies = scaling.scaled(frequencies)
    angles_TD2 = positions_T.double().unsqueeze(1) * frequencies
    return angles_TD2.cos().float(), angles_TD2.sin().float()


@torch.no_grad()
def forward_reference(
    qkv_TN: Tensor, cos_TD2: Tensor, sin_TD2: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (T, H, D), k (T, K, D) and v (T, K, D), contiguous, in the dtype of the product; q and k are rotated.

    Args:
        qkv_TN: product: H heads of queries, K of keys, K of values; contiguous.
        heads, kv_heads: H and K.
    """
    widened_THD = widen(qkv_TN).unflatten(1, (heads + 2 * kv_heads, -1))
    q_THD, k_TKD, v_TKD = widened_THD.split([heads, kv_heads, kv_heads], 1)
    rotated = (_rotate(q_THD, cos_TD2, sin_TD2), _rotate(k_TKD, cos_TD2, sin_TD2), v_TKD)
    q, k, v = (part.to(qkv_TN.dtype).contiguous() for part in rotated)
    return q, k, v


@torch.no_grad()
def backward_reference(
    dq_THD: Tensor,
    dk_TKD: Tensor,
    dv_TKD: Tensor,
    cos_TD2: Tensor,
    sin_TD2: Tensor,
    *,
    half: bool = True,
    fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> tuple[Tensor | None, Fp8Tensor | None]:
    """Return the gradient of the product, (T, N), in the dtype of the inputs and in FP8.

    The first is None without ``half``, the second without ``fp8``.

    Args:
        dq_THD, dk_TKD, dv_TKD: gradients of the three results; contiguous.
        fp8: scale of the gradient in e5m2; None for no FP8.
        frozen_scales: leave the scale as it is.
    """
    back = -sin_TD2
    parts = (_rotate(widen(dq_THD), cos_TD2, back), _rotate(widen(dk_TKD), cos_TD2, back), widen(dv_TKD))
    d_qkv_TN = torch.cat(parts, 1).flatten(1)
    d_qkv8 = None if fp8 is None else computed_reference(d_qkv_TN, fp8, E5M2, dq_THD.dtype, frozen_scales)
    return d_qkv_TN.to(dq_THD.dtype) if half else None, d_qkv8


def _rotate(x_THD: Tensor, cos_TD2: Tensor, sin_TD2: Tensor) -> Tensor:
    first, second = x_THD.chunk(2, 2)
    cos, sin = cos_TD2.unsqueeze(1), sin_TD2.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 2)


ROPE = Operation(
    "rope",
    Rope(forward_reference, backward_reference),
    {
        "triton": triton_kernels("common.ops.rope.triton"),
    },
    kernel_names=(("RoPE", r"^rope_"),),
    cases="common.ops.rope.cases",
)
"""Functions: :class:`Rope`."""
