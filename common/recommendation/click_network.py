"""Interface of the dense networks of click models: an MLP before the embeddings, and one logit at the end.

The embeddings are not part of a network: the caller computes x0 between :meth:`ClickNetwork.bottom` and
:meth:`ClickNetwork.head`.

Shapes: B samples, D dense features, W width of an embedding, X = (1 + tables) W.
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
    """Architecture options that the rules fix for every dense network.

    Attributes:
        width: W, size of an embedding and of the bottom MLP's output.
        bottom_mlp: output sizes of its layers, all with ReLU; the last is ``width``.
        top_mlp: output sizes of its layers, with ReLU except the last, whose only output is the logit.
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
    """Dense network before and after the embeddings.

    Attributes:
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
        """MLP of the dense features; the attribute has its published name."""

    def bottom(self, dense_BD: Tensor) -> Tensor:
        """Return the output of the bottom MLP: (B, W), in the dtype of the network.

        Args:
            dense_BD: (B, D), of any floating dtype; columns beyond D must be finite and are ignored.
        """
        aligned, columns = dense_BD.to(self._dtype), dense_BD.shape[1]
        if padded_columns(columns) > columns:
            aligned = F.pad(aligned, (0, padded_columns(columns) - columns))
        bottom_BW: Tensor = self.bottom_mlp(aligned)
        return bottom_BW

    @abstractmethod
    def head(self, x0_BX: Tensor) -> Tensor:
        """Return the logits from x0.

        Args:
            x0_BX: (B, X), contiguous, in the dtype of the network: the bottom MLP's output, then one vector per
                table, in the order of the tables.

        Returns:
            Logits (B,), fp32 (fp64 for a network in fp64).
        """

    @abstractmethod
    def sample_flops(self) -> float:
        """Return the FLOPs per sample of forward and backward, estimated as three times those of the forward pass."""


def loss(logit_B: Tensor, label_B: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of the logits, 0-d; labels are 0 or 1, (B,), in the logits' dtype."""
    return F.binary_cross_entropy_with_logits(logit_B, label_B)
