"""The dense network of DLRM: bottom MLP, dot interaction, top MLP.

Naumov et al., arXiv:1906.00091, as its reference has it, whose names the two stacks have. The embeddings are not part
of it: between :meth:`DenseNetwork.bottom` and :meth:`DenseNetwork.head` stands whatever makes x0.

Legend: B samples, D dense features, F = 1 + tables, W width of an embedding, X = F W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.dlrm.ops import dot_interaction
from common.config.ranges import AtLeast, Each
from common.errors import ConfigError
from common.nn.mlp import MLP, padded_columns
from common.ops.implementation import AUTO, OperationRequest, asked_for, select


@dataclass(frozen=True)
class Architecture:
    """What the rules fix of the dense network.

    Attributes:
        dense_features: D.
        width: W, of an embedding and of the bottom MLP's result.
        bottom_mlp: outputs of its layers, all with ReLU; the last is ``width``.
        top_mlp: outputs of its layers, with ReLU but for the last, whose only output is the logit.
    """

    dense_features: Annotated[int, AtLeast(1)]
    width: Annotated[int, AtLeast(1)]
    bottom_mlp: Annotated[tuple[int, ...], Each(AtLeast(1))]
    top_mlp: Annotated[tuple[int, ...], Each(AtLeast(1))]

    def __post_init__(self) -> None:
        if self.bottom_mlp[-1:] != (self.width,):
            raise ConfigError(f"bottom_mlp={list(self.bottom_mlp)}: its last layer must be width={self.width}")
        if self.top_mlp[-1:] != (1,):
            raise ConfigError(f"top_mlp={list(self.top_mlp)}: its last layer must be 1")


@dataclass(frozen=True)
class Implementations:
    """Choices of a recipe."""

    linear_relu: str = AUTO
    dot_interaction: str = AUTO


class DenseNetwork(nn.Module):
    """Everything but the embeddings.

    Args:
        architecture: what the rules fix.
        tables: of embeddings, each of which gives a sample one vector.
        implementations: of a recipe.
        device, dtype: of weights and activations.
        generator: of the initial weights, on the CPU.

    Attributes:
        bot_l, top_l: bottom and top MLP.
        vectors: F.
        inputs: X.
        choices: implementation by operation.
    """

    def __init__(
        self,
        architecture: Architecture,
        tables: int,
        implementations: Implementations,
        device: torch.device,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.vectors = 1 + tables
        self.inputs = self.vectors * architecture.width
        self._pairs = self.vectors * (self.vectors - 1) // 2
        self._width = architecture.width
        self.bot_l = MLP(architecture.dense_features, architecture.bottom_mlp)
        self.top_l = MLP(self._width + self._pairs, architecture.top_mlp, logit=True)

        def draw(layer: nn.Linear) -> None:
            layer.weight.normal_(std=math.sqrt(2 / (layer.in_features + layer.out_features)), generator=generator)
            layer.bias.normal_(std=math.sqrt(1 / layer.out_features), generator=generator)

        self.bot_l.draw(draw)
        self.top_l.draw(draw)
        self.to(device, dtype)

        with asked_for("model.linear_relu", implementations.linear_relu):
            linear_relu = self.bot_l.choose(implementations.linear_relu, dtype)
            self.top_l.choose(implementations.linear_relu, dtype)
        with asked_for("model.dot_interaction", implementations.dot_interaction):
            request = OperationRequest(device, dtype, {"vectors": self.vectors, "width": self._width})
            self._dot_interaction = select(dot_interaction.IMPLEMENTATIONS, implementations.dot_interaction, request)
        self.choices = {"linear_relu": linear_relu, "dot_interaction": self._dot_interaction.name}
        self._dtype = dtype

    def sample_flops(self) -> float:
        """FLOPs of a sample's forward pass three times, which is forward and backward; of the pairs each once."""
        interaction = self._pairs * self._width
        return 3 * 2.0 * (self.bot_l.multiply_adds + interaction + self.top_l.multiply_adds)

    def bottom(self, dense_BD: Tensor) -> Tensor:
        """The bottom MLP.

        Args:
            dense_BD: (B, D), of any floating dtype; columns beyond D must be finite and count for nothing.

        Returns:
            (B, W), in the dtype of the network.
        """
        aligned, columns = dense_BD.to(self._dtype), dense_BD.shape[1]
        if padded_columns(columns) > columns:
            aligned = F.pad(aligned, (0, padded_columns(columns) - columns))
        bottom_BW: Tensor = self.bot_l(aligned)
        return bottom_BW

    def head(self, x0_BX: Tensor) -> Tensor:
        """Dot interaction and top MLP.

        Args:
            x0_BX: (B, X), contiguous, in the dtype of the network: the bottom MLP's result, then a vector of every
                table, in their order.

        Returns:
            Logits (B,), fp32 (fp64 of a network in fp64).
        """
        x_BFW = x0_BX.view(-1, self.vectors, self._width)
        product_BY = self._dot_interaction.function(x_BFW, padded_columns(self._width + self._pairs))
        logit_B: Tensor = self.top_l(product_BY)
        return logit_B


def loss(logit_B: Tensor, label_B: Tensor) -> Tensor:
    """Mean binary cross-entropy of the logits, 0-d; labels are 0 or 1, (B,), in the dtype of the logits."""
    return F.binary_cross_entropy_with_logits(logit_B, label_B)
