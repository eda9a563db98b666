"""What the dense networks of click models have in common: an MLP below the embeddings, and one logit at the end.

The embeddings are not part of a network: between :meth:`ClickNetwork.bottom` and :meth:`ClickNetwork.head` stands
whatever makes x0.

Legend: B samples, D dense features, W width of an embedding, X = (1 + tables) W.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.ranges import AtLeast, Each
from common.errors import ConfigError
from common.nn.mlp import MLP, padded_columns


@dataclass(frozen=True)
class ClickArchitecture:
    """What the rules fix of every dense network.

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


class ClickNetwork(nn.Module, ABC):
    """What stands before and behind the embeddings.

    Args:
        inputs: X.
        dtype: of weights and activations.

    Attributes:
        inputs: as given.
        choices: implementation by operation; the subclass fills it.
    """

    def __init__(self, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs = inputs
        self.choices: dict[str, str] = {}
        self._dtype = dtype

    @property
    @abstractmethod
    def bottom_mlp(self) -> MLP:
        """Of the dense features, under its published name."""

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
        bottom_BW: Tensor = self.bottom_mlp(aligned)
        return bottom_BW

    @abstractmethod
    def head(self, x0_BX: Tensor) -> Tensor:
        """All that follows the embeddings.

        Args:
            x0_BX: (B, X), contiguous, in the dtype of the network: the bottom MLP's result, then a vector of every
                table, in their order.

        Returns:
            Logits (B,), fp32 (fp64 of a network in fp64).
        """

    @abstractmethod
    def sample_flops(self) -> float:
        """FLOPs of a sample's forward pass three times, which is forward and backward."""


def loss(logit_B: Tensor, label_B: Tensor) -> Tensor:
    """Mean binary cross-entropy of the logits, 0-d; labels are 0 or 1, (B,), in the dtype of the logits."""
    return F.binary_cross_entropy_with_logits(logit_B, label_B)
