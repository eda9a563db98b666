"""The dense network of DLRM-DCNv2: bottom MLP, low-rank cross network, top MLP.

Naumov et al., arXiv:1906.00091, with the cross network of Wang et al., arXiv:2008.13535, as in TorchRec's DLRM_DCN,
whose names the three parts have. The embeddings are not part of it: between :meth:`DenseNetwork.bottom` and
:meth:`DenseNetwork.head` stands whatever makes x0.

Legend: B samples, D dense features, W width of an embedding, X = (1 + tables) W, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.dlrm_dcnv2.ops import cross_network
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
        cross_layers, cross_rank: of the cross network.
        top_mlp: outputs of its layers, with ReLU but for the last, whose only output is the logit.
    """

    dense_features: Annotated[int, AtLeast(1)]
    width: Annotated[int, AtLeast(1)]
    bottom_mlp: Annotated[tuple[int, ...], Each(AtLeast(1))]
    cross_layers: Annotated[int, AtLeast(1)]
    cross_rank: Annotated[int, AtLeast(1)]
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
    cross_network: str = AUTO


class CrossNet(nn.Module):
    """The cross network's weights.

    Attributes:
        V_kernels, W_kernels, bias: of every layer, (R, X), (X, R) and (X,).
    """

    def __init__(self, inputs: int, rank: int, layers: int) -> None:
        super().__init__()
        self.V_kernels = _parameters(layers, rank, inputs)
        self.W_kernels = _parameters(layers, inputs, rank)
        self.bias = _parameters(layers, inputs)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Normal weights of Glorot's variance, ``2 / (X + R)``; no bias."""
        for kernel in (*self.V_kernels, *self.W_kernels):
            kernel.normal_(std=math.sqrt(2 / sum(kernel.shape)), generator=generator)
        for bias in self.bias:
            bias.zero_()

    def forward(self, x0_BX: Tensor, function: Callable[..., Tensor]) -> Tensor:
        """The last layer's result, (B, X), by an implementation of the operation."""
        return function(x0_BX, list(self.V_kernels), list(self.W_kernels), list(self.bias))


def _parameters(layers: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(layers))


class DenseNetwork(nn.Module):
    """Everything but the embeddings.

    Args:
        architecture: what the rules fix.
        tables: of embeddings, each of which gives a sample one vector.
        implementations: of a recipe.
        device, dtype: of weights and activations.
        generator: of the initial weights, on the CPU.

    Attributes:
        dense_arch, crossnet, over_arch: bottom MLP, cross network, top MLP.
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
        self.inputs = (1 + tables) * architecture.width
        self.dense_arch = MLP(architecture.dense_features, architecture.bottom_mlp)
        self.crossnet = CrossNet(self.inputs, architecture.cross_rank, architecture.cross_layers)
        self.over_arch = MLP(self.inputs, architecture.top_mlp, logit=True)

        def draw(layer: nn.Linear) -> None:
            bound = 1 / math.sqrt(layer.in_features)  # PyTorch's own for linear layers
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-bound, bound, generator=generator)

        self.dense_arch.draw(draw)
        self.crossnet.draw(generator)
        self.over_arch.draw(draw)
        self.to(device, dtype)

        with asked_for("model.linear_relu", implementations.linear_relu):
            linear_relu = self.dense_arch.choose(implementations.linear_relu, dtype)
            self.over_arch.choose(implementations.linear_relu, dtype)
        with asked_for("model.cross_network", implementations.cross_network):
            request = OperationRequest(device, dtype, {"inputs": self.inputs, "rank": architecture.cross_rank})
            self._cross_network = select(cross_network.IMPLEMENTATIONS, implementations.cross_network, request)
        self.choices = {"linear_relu": linear_relu, "cross_network": self._cross_network.name}
        self._dtype = dtype

    def sample_flops(self) -> float:
        """FLOPs of a sample's forward pass three times, which is forward and backward."""
        cross = sum(kernel.numel() for kernel in (*self.crossnet.V_kernels, *self.crossnet.W_kernels))
        return 3 * 2.0 * (self.dense_arch.multiply_adds + cross + self.over_arch.multiply_adds)

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
        bottom_BW: Tensor = self.dense_arch(aligned)
        return bottom_BW

    def head(self, x0_BX: Tensor) -> Tensor:
        """Cross network and top MLP.

        Args:
            x0_BX: (B, X), contiguous, in the dtype of the network: the bottom MLP's result, then a vector of every
                table, in their order.

        Returns:
            Logits (B,), fp32 (fp64 of a network in fp64).
        """
        crossed_BX = self.crossnet(x0_BX, self._cross_network.function)
        logit_B: Tensor = self.over_arch(crossed_BX)
        return logit_B


def loss(logit_B: Tensor, label_B: Tensor) -> Tensor:
    """Mean binary cross-entropy of the logits, 0-d; labels are 0 or 1, (B,), in the dtype of the logits."""
    return F.binary_cross_entropy_with_logits(logit_B, label_B)
