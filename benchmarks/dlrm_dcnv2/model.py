"""Dense network of DLRM-DCNv2: bottom MLP, low-rank cross network, top MLP.

Naumov et al., arXiv:1906.00091, with the cross network of Wang et al., arXiv:2008.13535. The three parts have the
names of TorchRec's DLRM_DCN. The embeddings are not part of the network: the caller computes x0 between
:meth:`DlrmDcnv2Network.bottom` and :meth:`DlrmDcnv2Network.head`.

Legend: B samples, D dense features, W width of an embedding, X = (1 + tables) W, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from benchmarks.dlrm_dcnv2.ops.cross_network import CROSS_NETWORK
from common.config.ranges import AtLeast
from common.nn.choice import choose_layers
from common.nn.mlp import MLP
from common.ops.embedding_bags import EMBEDDING_BAGS
from common.ops.linear_relu import LINEAR_RELU
from common.ops.operation import Operation, OperationRequest, select
from common.recommendation.click_network import ClickArchitecture, ClickNetwork


@dataclass(frozen=True)
class DlrmDcnv2Architecture(ClickArchitecture):
    """Architecture options of the dense network, fixed by the rules.

    Attributes:
        cross_rank: R, rank of its weights.
    """

    cross_layers: Annotated[int, AtLeast(1)]
    cross_rank: Annotated[int, AtLeast(1)]


OPERATIONS: dict[str, Operation] = {
    "linear_relu": LINEAR_RELU,
    "cross_network": CROSS_NETWORK,
    "embedding_bags": EMBEDDING_BAGS,
}
"""Operations whose implementation ``model.implementations`` selects."""


class CrossNet(nn.Module):
    """Parameters of the cross network.

    Attributes:
        V_kernels, W_kernels, bias: for each layer, (R, X), (X, R) and (X,).
    """

    def __init__(self, inputs: int, rank: int, layers: int) -> None:
        super().__init__()
        self.V_kernels = _parameters(layers, rank, inputs)
        self.W_kernels = _parameters(layers, inputs, rank)
        self.bias = _parameters(layers, inputs)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw the initial values: normal weights with Glorot's variance ``2 / (X + R)``, and zero bias."""
        for kernel in (*self.V_kernels, *self.W_kernels):
            kernel.normal_(std=math.sqrt(2 / sum(kernel.shape)), generator=generator)
        for bias in self.bias:
            bias.zero_()

    def forward(self, x0_BX: Tensor, function: Callable[..., Tensor]) -> Tensor:
        """Return the output of the last layer, (B, X); ``function`` is an implementation of the operation."""
        return function(x0_BX, list(self.V_kernels), list(self.W_kernels), list(self.bias))


def _parameters(layers: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(layers))


class DlrmDcnv2Network(ClickNetwork):
    """Dense network of DLRM-DCNv2: the whole model except the embeddings.

    Args:
        tables: number of embedding tables; each gives one vector per sample.
        generator: CPU generator for the initial weights.

    Attributes:
        dense_arch, crossnet, over_arch: bottom MLP, cross network, top MLP.
    """

    def __init__(
        self,
        architecture: DlrmDcnv2Architecture,
        tables: int,
        implementations: Mapping[str, str],
        device: torch.device,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__((1 + tables) * architecture.width, dtype)
        self.dense_arch = MLP(architecture.dense_features, architecture.bottom_mlp)
        self.crossnet = CrossNet(self.inputs, architecture.cross_rank, architecture.cross_layers)
        self.over_arch = MLP(self.inputs, architecture.top_mlp, logit=True)

        def draw(layer: nn.Linear) -> None:
            bound = 1 / math.sqrt(layer.in_features)  # PyTorch's default for linear layers
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-bound, bound, generator=generator)

        self.dense_arch.draw(draw)
        self.crossnet.draw(generator)
        self.over_arch.draw(draw)
        self.to(device, dtype)

        layers = choose_layers(self, {"linear_relu": MLP}, implementations, dtype)
        request = OperationRequest(device, dtype, {"inputs": self.inputs, "rank": architecture.cross_rank})
        self._cross_network = select(implementations, "cross_network", CROSS_NETWORK, request)
        self.choices = {**layers, "cross_network": self._cross_network.name}

    def sample_flops(self) -> float:
        """Return the FLOPs of one sample, forward and backward (three forward passes)."""
        cross = sum(kernel.numel() for kernel in (*self.crossnet.V_kernels, *self.crossnet.W_kernels))
        return 3 * 2.0 * (self.dense_arch.multiply_adds + cross + self.over_arch.multiply_adds)

    def parameters_by_layer(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name, in the order of the forward pass.

        ``named_parameters`` instead groups the cross network's parameters by kind.
        """
        named = dict(self.named_parameters())
        cross = [
            f"crossnet.{kind}.{number}"
            for number in range(len(self.crossnet.bias))
            for kind in ("V_kernels", "W_kernels", "bias")
        ]
        before, after = ([name for name in named if name.startswith(part)] for part in ("dense_arch.", "over_arch."))
        return {name: named[name] for name in (*before, *cross, *after)}

    @property
    def bottom_mlp(self) -> MLP:
        return self.dense_arch

    def head(self, x0_BX: Tensor) -> Tensor:
        """Return the logits (B,): cross network, then top MLP."""
        crossed_BX = self.crossnet(x0_BX, self._cross_network.function)
        logit_B: Tensor = self.over_arch(crossed_BX)
        return logit_B
