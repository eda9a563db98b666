"""Dense network of DLRM: bottom MLP, dot interaction, top MLP.

Naumov et al., arXiv:1906.00091. The two MLPs have the names of the reference implementation. The embeddings are not
part of the network: the caller computes x0 between :meth:`DlrmNetwork.bottom` and :meth:`DlrmNetwork.head`.

Legend: B samples, D dense features, F = 1 + tables, W width of an embedding, X = F W.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.dlrm.ops.dot_interaction import DOT_INTERACTION
from common.nn.choice import choose_layers
from common.nn.mlp import MLP, padded_columns
from common.ops.embedding_bags import EMBEDDING_BAGS
from common.ops.linear_relu import LINEAR_RELU
from common.ops.operation import Operation, OperationRequest, select
from common.recommendation.click_network import ClickArchitecture, ClickNetwork

OPERATIONS: dict[str, Operation] = {
    "linear_relu": LINEAR_RELU,
    "dot_interaction": DOT_INTERACTION,
    "embedding_bags": EMBEDDING_BAGS,
}
"""Operations whose implementation ``model.implementations`` selects."""


class DlrmNetwork(ClickNetwork):
    """Dense network of DLRM: the whole model except the embeddings.

    Args:
        tables: number of embedding tables; each gives one vector per sample.
        generator: CPU generator for the initial weights.

    Attributes:
        bot_l, top_l: bottom and top MLP.
        vectors: F, vectors per sample.
    """

    def __init__(
        self,
        architecture: ClickArchitecture,
        tables: int,
        implementations: Mapping[str, str],
        device: torch.device,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__((1 + tables) * architecture.width, dtype)
        self.vectors = 1 + tables
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

        layers = choose_layers(self, {"linear_relu": MLP}, implementations, dtype)
        request = OperationRequest(device, dtype, {"vectors": self.vectors, "width": self._width})
        self._dot_interaction = select(implementations, "dot_interaction", DOT_INTERACTION, request)
        self.choices = {**layers, "dot_interaction": self._dot_interaction.name}

    def sample_flops(self) -> float:
        """Return the FLOPs of one sample, forward and backward (three forward passes). Each pair counts once."""
        interaction = self._pairs * self._width
        return 3 * 2.0 * (self.bot_l.multiply_adds + interaction + self.top_l.multiply_adds)

    @property
    def bottom_mlp(self) -> MLP:
        return self.bot_l

    def head(self, x0_BX: Tensor) -> Tensor:
        """Return the logits (B,): dot interaction, then top MLP."""
        x_BFW = x0_BX.view(-1, self.vectors, self._width)
        product_BY = self._dot_interaction.function(x_BFW, padded_columns(self._width + self._pairs))
        logit_B: Tensor = self.top_l(product_BY)
        return logit_B
