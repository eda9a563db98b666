"""A click model: a dense network around embeddings, from a batch of samples to logits and loss.

Legend: B samples, D dense features, L ids of a sample, W width of an embedding, X = (1 + tables) W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.data.batches import Batch
from common.recommendation.tables import Tables
from common.step.train_step import Losses


class DenseNetwork(Protocol):
    """What stands before and behind the embeddings."""

    def bottom(self, dense_BD: Tensor) -> Tensor:
        """(B, W) of the dense features."""

    def head(self, x0_BX: Tensor) -> Tensor:
        """Logits (B,) of what :meth:`bottom` gave and the vectors of all tables."""


class Embeddings(Protocol):
    """Gives x0."""

    def forward(self, bottom_BW: Tensor, ids_BL: Tensor) -> Tensor:
        """x0 (B, X): ``bottom_BW``, then the vectors of all tables. Collective."""


class ClickModel:
    """Network and embeddings as one function.

    Args:
        network: bottom MLP and all that follows the embeddings.
        embeddings: of all tables.
    """

    def __init__(self, network: DenseNetwork, embeddings: Embeddings) -> None:
        self._network, self._embeddings = network, embeddings

    def logits(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Logits (B,) of ``dense`` (B, D) and ``ids`` (B, L), int32. Collective; capturable."""
        x0_BX = self._embeddings.forward(self._network.bottom(tensors["dense"]), tensors["ids"])
        return self._network.head(x0_BX)

    def loss(self, micro_batch: Batch) -> Losses:
        """Binary cross-entropy of the logits with ``label`` (B,), the mean over the micro-batch."""
        logit_B = self.logits(micro_batch.tensors)
        label_B = micro_batch.tensors["label"].to(logit_B.dtype)
        mean = F.binary_cross_entropy_with_logits(logit_B, label_B)
        return Losses(mean, {"loss": mean.detach()})


def made_up(
    tables: Tables, dense_features: int, samples: int, generator: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Samples without a meaning, as a reader decodes them; ids are uniform over their tables.

    Args:
        tables: of the ids.
        dense_features: D.
        samples: B.
        generator: of the CPU.
        device: of the tensors.

    Returns:
        ``label`` (B,) and ``dense`` (B, D), float32; ``ids`` (B, L), int32.
    """
    columns = [
        torch.randint(table.rows, (samples, table.hotness), generator=generator, dtype=torch.int32)
        for table in tables.tables
    ]
    made = {
        "label": torch.randint(2, (samples,), generator=generator).float(),
        "dense": 4 * torch.rand((samples, dense_features), generator=generator),
        "ids": torch.cat(columns, dim=1),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}
