"""Operations of the blocks with hand-written backward passes; their implementations are chosen by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpt3.architecture import Architecture
from common.ops.bias_gelu import BIAS_GELU_PASSES
from common.ops.bias_gelu.reference import BiasGelu
from common.ops.bias_gradient import BIAS_GRADIENT, RowSums
from common.ops.causal_attention import CAUSAL_ATTENTION
from common.ops.causal_attention.reference import CausalAttention
from common.ops.cross_entropy import OF_A_PART
from common.ops.cross_entropy.reference import OfAPart
from common.ops.operation import AUTO, Operation, OperationRequest, choose
from common.ops.qkv_gradient import QKV_GRADIENT, JoinQkv
from common.ops.row_norm import LAYER_NORM_1P
from common.ops.row_norm.reference import RowNorm

BLOCK_OPERATIONS: dict[str, Operation] = {
    "attention": CAUSAL_ATTENTION,
    "layer_norm": LAYER_NORM_1P,
    "bias_gelu": BIAS_GELU_PASSES,
    "qkv_gradient": QKV_GRADIENT,
    "cross_entropy": OF_A_PART,
}
"""Operations of ``written`` blocks and of the head, by their names in ``model.implementations``."""


@dataclass(frozen=True)
class Operations:
    """Chosen implementations; :mod:`common.ops` has their signatures.

    Attributes:
        bias_gradient: computes the bias gradient of the last product in a part of the network.
    """

    attention: CausalAttention
    layer_norm: RowNorm
    bias_gelu: BiasGelu
    qkv_gradient: JoinQkv
    cross_entropy: OfAPart
    bias_gradient: RowSums


def choose_operations(
    requested: Mapping[str, str], architecture: Architecture, device: torch.device, dtype: torch.dtype, ranks: int = 1
) -> tuple[Operations, dict[str, str]]:
    """Return the operations, and the name of the chosen implementation of each.

    Args:
        requested: name of an implementation, or ``auto``, for each operation.
        dtype: dtype of activations.
        ranks: number of ranks of tp.

    Raises:
        UnsupportedImplementation: a requested implementation does not support device, dtype or sizes.
    """
    sizes = {
        "features": architecture.hidden,
        "head_size": architecture.head_size,
        "columns": architecture.padded_vocabulary(ranks) // ranks,
    }
    request = OperationRequest(device, dtype, sizes)
    chosen = choose(requested, BLOCK_OPERATIONS, request)
    functions: dict[str, Any] = {name: choice.function for name, choice in chosen.items()}
    functions["bias_gradient"] = BIAS_GRADIENT.select(AUTO, request).function
    return Operations(**functions), {name: choice.name for name, choice in chosen.items()}
