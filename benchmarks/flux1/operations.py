"""The operations of FLUX.1's blocks, and the choice of their implementations.

Matrix products have rows of tokens, (N L, features); the residual stream is (N, L, C). An operation before a product
writes its rows, an operation after a product reads them and adds its bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.flux1.architecture import FluxArchitecture
from common.ops.bias_gelu import BIAS_GELU
from common.ops.dense_attention import DENSE_ATTENTION, Attention
from common.ops.linear import LINEAR
from common.ops.operation import Operation, OperationRequest, choose
from common.ops.triton_support import widen


def modulated_norm_reference(x_NLC: Tensor, shift_NC: Tensor, scale_NC: Tensor, epsilon: float) -> Tensor:
    """Return ``(1 + scale) LayerNorm(x) + shift`` as rows (N L, C), dtype of ``x_NLC``; the norm has no weights."""
    normed_NLC = F.layer_norm(widen(x_NLC), x_NLC.shape[-1:], eps=epsilon)
    y_NLC = (1 + widen(scale_NC).unsqueeze(1)) * normed_NLC + widen(shift_NC).unsqueeze(1)
    return y_NLC.to(x_NLC.dtype).flatten(0, 1)


def gated_add_reference(x_NLC: Tensor, y_RC: Tensor, bias_C: Tensor, gate_NC: Tensor) -> Tensor:
    """Return ``x + gate (y + bias)``, (N, L, C), dtype of ``x_NLC``; ``y_RC``: rows (N L, C) of a product."""
    branch_NLC = (widen(y_RC) + widen(bias_C)).view_as(x_NLC)
    return (widen(x_NLC) + widen(gate_NC).unsqueeze(1) * branch_NLC).to(x_NLC.dtype)


class Part(NamedTuple):
    """Queries, keys and values of some tokens of every sample.

    Attributes:
        qkv_RE: rows (N L, 3 H D) of a product with its bias: the queries of all heads, the keys, the values. May be a
            view of a wider matrix.
        query_weight_D, key_weight_D: weights of the norms of queries and keys.
    """

    qkv_RE: Tensor
    query_weight_D: Tensor
    key_weight_D: Tensor


def rotated_heads_reference(
    parts: Sequence[Part], samples: int, cos_SJ: Tensor, sin_SJ: Tensor, epsilon: float
) -> Tensor:
    """Return queries and keys, normalised by head and rotated, and values: (N, S, 3, H, D), dtype of the products.

    A query or key x of a head becomes ``weight x / sqrt(mean(x^2) + epsilon)``. Then each pair of neighbours
    (x_2j, x_2j+1) is rotated by the angle of token and j (Su et al., arXiv:2104.09864).

    Args:
        parts: parts of all tokens, whose tokens follow each other in a sample.
        samples: N.
        cos_SJ, sin_SJ: cosines and sines of the angles, (S, D / 2), fp32 or fp64.
    """
    joined = []
    for part in parts:
        size = len(part.query_weight_D)
        q, k, v = widen(part.qkv_RE).view(samples, -1, 3, part.qkv_RE.shape[1] // (3 * size), size).unbind(2)
        q, k = (
            F.rms_norm(x, x.shape[-1:], widen(weight), epsilon)
            for x, weight in ((q, part.query_weight_D), (k, part.key_weight_D))
        )
        joined.append((q, k, v))
    q_NSHD, k_NSHD, v_NSHD = (torch.cat(tensors, 1) for tensors in zip(*joined, strict=True))
    rotated = [_rotated(x, cos_SJ, sin_SJ) for x in (q_NSHD, k_NSHD)]
    return torch.stack([*rotated, v_NSHD], 2).to(parts[0].qkv_RE.dtype)


def _rotated(x_NSHD: Tensor, cos_SJ: Tensor, sin_SJ: Tensor) -> Tensor:
    even, odd = x_NSHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_SJ.to(x_NSHD.dtype).unsqueeze(1), sin_SJ.to(x_NSHD.dtype).unsqueeze(1)
    return torch.stack([cos * even - sin * odd, sin * even + cos * odd], -1).flatten(-2)


MODULATED_NORM = Operation("modulated_norm", modulated_norm_reference)
GATED_ADD = Operation("gated_add", gated_add_reference)
ROTATED_HEADS = Operation("rotated_heads", rotated_heads_reference)

OPERATIONS: dict[str, Operation] = {
    "attention": DENSE_ATTENTION,
    "modulated_norm": MODULATED_NORM,
    "gated_add": GATED_ADD,
    "rotated_heads": ROTATED_HEADS,
    "gelu": BIAS_GELU,
    "linear": LINEAR,
}
"""Operations that ``model.implementations`` can configure.

``linear`` applies to the products over tokens in the blocks; all other products are PyTorch's.
"""


@dataclass(frozen=True)
class Operations:
    """The chosen functions.

    Attributes:
        linear: name of the chosen implementation of the products.
        choices: names of all chosen implementations by operation.
    """

    attention: Attention
    modulated_norm: Callable[..., Tensor]
    gated_add: Callable[..., Tensor]
    rotated_heads: Callable[..., Tensor]
    gelu: Callable[..., Tensor]
    linear: str
    choices: dict[str, str]


def choose_operations(
    requested: Mapping[str, str], architecture: FluxArchitecture, device: torch.device, dtype: torch.dtype
) -> Operations:
    """Choose the implementations of all operations.

    Args:
        requested: ``model.implementations``.

    Raises:
        UnsupportedImplementation: names ``model.implementations.<operation>``.
    """
    shape = architecture
    sizes = {
        "columns": shape.hidden, "head_size": shape.head_size, "queries": shape.length, "keys": shape.length,
    }  # fmt: skip
    chosen = choose(requested, OPERATIONS, OperationRequest(device, dtype, sizes))
    choices = {name: choice.name for name, choice in chosen.items()}
    functions = {name: choice.function for name, choice in chosen.items() if name != "linear"}
    return Operations(**functions, linear=choices["linear"], choices=choices)
