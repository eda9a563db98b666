"""The operations of FLUX.1's blocks, and the choice of their implementations.

Tensors between operations have a row per token, sample by sample. The operation after a product adds its bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.flux1.architecture import FluxArchitecture
from benchmarks.flux1.ops.modulated_norm import MODULATED_NORM
from common.ops.bias_gelu import BIAS_GELU
from common.ops.dense_attention import DENSE_ATTENTION, Attention
from common.ops.fp8_cast.reference import Handover
from common.ops.linear import LINEAR
from common.ops.operation import Operation, OperationRequest, choose
from common.ops.triton_support import widen


def gated_residual_reference(
    x_RE: Tensor,
    delta_RE: Tensor,
    other_RE: Tensor | None,
    bias_E: Tensor,
    gate_NE: Tensor,
    *,
    handovers: Sequence[Handover | None] = (),
) -> Tensor:
    """Return ``x + gate (delta + other + bias)``, (R, E), dtype of ``x_RE``."""
    sum_RE = widen(delta_RE) + widen(bias_E)
    if other_RE is not None:
        sum_RE = sum_RE + widen(other_RE)
    gated_NLE = widen(gate_NE).unsqueeze(1) * sum_RE.unflatten(0, (len(gate_NE), -1))
    return (widen(x_RE) + gated_NLE.flatten(0, 1)).to(x_RE.dtype)


class QkvStream(NamedTuple):
    """Queries, keys and values of some tokens of every sample.

    Attributes:
        qkv_RF: rows (R, 3 H D) of a product without its bias: the queries of all heads, the keys, the values.
        bias_F: bias of the product.
        query_weight_D, key_weight_D: weights of the norms of queries and keys.
        tokens: tokens of a sample.
        handover: receives the gradient of ``qkv_RF`` in e5m2 if it has a scale.
    """

    qkv_RF: Tensor
    bias_F: Tensor
    query_weight_D: Tensor
    key_weight_D: Tensor
    tokens: int
    handover: Handover | None = None


def qk_norm_rope_reference(
    streams: Sequence[QkvStream], cos_SJ: Tensor, sin_SJ: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normalised by head and rotated, and values: (N, S, H, D) each, dtype of the products.

    A query or key x of a head becomes ``weight x / sqrt(mean(x^2) + epsilon)``. Then each pair of neighbours
    (x_2j, x_2j+1) is rotated by the angle of token and j (Su et al., arXiv:2104.09864).

    Args:
        streams: parts of the tokens, which follow each other in a sample.
        cos_SJ, sin_SJ: cosines and sines of the angles, (S, D / 2), fp32 or fp64.
    """
    joined = []
    for stream in streams:
        qkv_RF, size = widen(stream.qkv_RF) + widen(stream.bias_F), len(stream.query_weight_D)
        q, k, v = qkv_RF.unflatten(0, (-1, stream.tokens)).unflatten(-1, (3, -1, size)).unbind(2)
        q = F.rms_norm(q, (size,), widen(stream.query_weight_D), epsilon)
        k = F.rms_norm(k, (size,), widen(stream.key_weight_D), epsilon)
        joined.append((q, k, v))
    q_NSHD, k_NSHD, v_NSHD = (torch.cat(tensors, 1) for tensors in zip(*joined, strict=True))
    dtype = streams[0].qkv_RF.dtype
    return _rotated(q_NSHD, cos_SJ, sin_SJ).to(dtype), _rotated(k_NSHD, cos_SJ, sin_SJ).to(dtype), v_NSHD.to(dtype)


def _rotated(x_NSHD: Tensor, cos_SJ: Tensor, sin_SJ: Tensor) -> Tensor:
    even, odd = x_NSHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_SJ.to(x_NSHD.dtype).unsqueeze(1), sin_SJ.to(x_NSHD.dtype).unsqueeze(1)
    return torch.stack([cos * even - sin * odd, sin * even + cos * odd], -1).flatten(-2)


GATED_RESIDUAL = Operation("gated_residual", gated_residual_reference)
QK_NORM_ROPE = Operation("qk_norm_rope", qk_norm_rope_reference)

OPERATIONS: dict[str, Operation] = {
    "attention": DENSE_ATTENTION,
    "modulated_norm": MODULATED_NORM,
    "gated_residual": GATED_RESIDUAL,
    "qk_norm_rope": QK_NORM_ROPE,
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
    modulated_norm: Callable[..., tuple[Tensor, Any]]
    gated_residual: Callable[..., Tensor]
    qk_norm_rope: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gelu: Callable[..., Any]
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
        "columns": shape.hidden, "features": shape.hidden, "head_size": shape.head_size, "queries": shape.length,
        "keys": shape.length,
    }  # fmt: skip
    chosen = choose(requested, OPERATIONS, OperationRequest(device, dtype, sizes))
    choices = {name: choice.name for name, choice in chosen.items()}
    functions = {name: choice.function for name, choice in chosen.items() if name != "linear"}
    return Operations(**functions, linear=choices["linear"], choices=choices)
