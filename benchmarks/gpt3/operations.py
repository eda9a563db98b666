"""How the written halves of a block run: one implementation of each operation, chosen by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.gpt3.architecture import Architecture
from common.ops import bias_gelu, bias_gradient, causal_attention, cross_entropy, layer_norm_1p, qkv_gradient
from common.ops.bias_gelu.plain import BiasGelu
from common.ops.bias_gradient import RowSums
from common.ops.causal_attention.plain import CausalAttention
from common.ops.cross_entropy.plain import OfAPart
from common.ops.implementation import AUTO, Implementation, OperationRequest, asked_for, select
from common.ops.layer_norm_1p.plain import LayerNorm1p
from common.ops.qkv_gradient import JoinQkv

OPERATIONS: dict[str, Mapping[str, Implementation]] = {
    "attention": causal_attention.IMPLEMENTATIONS,
    "layer_norm": layer_norm_1p.IMPLEMENTATIONS,
    "bias_gelu": bias_gelu.WITHOUT_AUTOGRAD,
    "qkv_gradient": qkv_gradient.IMPLEMENTATIONS,
    "cross_entropy": cross_entropy.OF_A_PART,
}
"""What is chosen."""

KERNEL_NAMES = (
    *causal_attention.KERNEL_NAMES,
    *layer_norm_1p.KERNEL_NAMES,
    *bias_gelu.KERNEL_NAMES,
    *qkv_gradient.KERNEL_NAMES,
    *cross_entropy.KERNEL_NAMES,
    *bias_gradient.KERNEL_NAMES,
)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""


@dataclass(frozen=True)
class Operations:
    """The chosen implementations; signatures in :mod:`common.ops`.

    Attributes:
        qkv_gradient: a function.
        bias_gradient: of the last product of a part of the network.
    """

    attention: CausalAttention
    layer_norm: LayerNorm1p
    bias_gelu: BiasGelu
    qkv_gradient: JoinQkv
    cross_entropy: OfAPart
    bias_gradient: RowSums


class Requested(Protocol):
    """Names of implementations, or ``auto``."""

    @property
    def attention(self) -> str: ...
    @property
    def layer_norm(self) -> str: ...
    @property
    def bias_gelu(self) -> str: ...
    @property
    def qkv_gradient(self) -> str: ...
    @property
    def cross_entropy(self) -> str: ...


def choose(
    requested: Requested, architecture: Architecture, device: torch.device, dtype: torch.dtype, ranks: int = 1
) -> tuple[Operations, dict[str, str]]:
    """The operations, and the names chosen.

    Args:
        requested: names.
        architecture: sizes.
        device, dtype: of activations.
        ranks: of tp.

    Raises:
        UnsupportedImplementation: naming ``model.<operation>``.
    """
    sizes = {
        "features": architecture.hidden,
        "head_size": architecture.head_size,
        "columns": architecture.padded_vocabulary(ranks) // ranks,
    }
    request = OperationRequest(device, dtype, sizes)
    chosen = {}
    for name, implementations in OPERATIONS.items():
        wanted = getattr(requested, name)
        with asked_for(f"model.{name}", wanted):
            chosen[name] = select(implementations, wanted, request)
    functions: dict[str, Any] = {name: implementation.function for name, implementation in chosen.items()}
    functions["bias_gradient"] = select(bias_gradient.IMPLEMENTATIONS, AUTO, request).function
    return Operations(**functions), {name: implementation.name for name, implementation in chosen.items()}
