"""Low-rank adapters of a decoder, and where its tokens stand.

Hu et al., arXiv:2106.09685: ``y = x W^T + (alpha / r) dropout(x) A^T B^T``. The dropout is on the adapter's input
alone, and its mask a function of seed, call site and the element's place in the whole micro-batch: nothing is stored,
and every split of tokens or columns over ranks drops the same elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.distributed.tensor_parallel.layers import Adapter, Dropout
from common.ops.dropout.reference import keep_mask, scale_of_kept, threshold


@dataclass(frozen=True)
class LoraSettings(Adapter):
    """Low-rank adapters.

    Attributes:
        dropout: probability of dropping an element of an adapter's input.
    """

    dropout: float


@dataclass(frozen=True)
class TokenPlaces:
    """Where this rank's tokens stand.

    Attributes:
        rows: of the micro-batch.
        positions: int64 (T,), place of each token in its row.
        numbers: int64 (T,), place of each token in the micro-batch of all ranks that share it, rows after one another.
        seed: 0-d int64, of the dropout; None drops nothing (evaluation).
    """

    rows: int
    positions: Tensor
    numbers: Tensor
    seed: Tensor | None = None

    @classmethod
    def of(cls, rows: int, length: int, kept_S: Tensor, seed: Tensor | None = None) -> TokenPlaces:
        """Places of the columns ``kept_S`` (int64) of rows that are ``length`` long."""
        starts = torch.arange(rows, device=kept_S.device).unsqueeze(1) * length
        return cls(rows, kept_S.repeat(rows), (starts + kept_S).flatten(), seed)

    @classmethod
    def whole(
        cls, rows: int, length: int, seed: Tensor | None = None, device: torch.device | None = None
    ) -> TokenPlaces:
        """Places of whole rows."""
        return cls.of(rows, length, torch.arange(length, device=device), seed)


def adapter_dropout(lora: LoraSettings | None, site: int, places: TokenPlaces) -> Dropout | None:
    """The dropout of the adapter at call site ``site``, for the layers of :mod:`common.distributed.tensor_parallel`."""
    seed = places.seed
    if lora is None or seed is None or threshold(lora.dropout) == 0:
        return None
    p = lora.dropout

    def dropout(x: Tensor, rows: Tensor, columns: int, first_column: int) -> Tensor:
        column = torch.arange(first_column, first_column + x.shape[1], device=x.device)
        keep = keep_mask(seed, site, rows.unsqueeze(1) * columns + column, p)
        return (x * scale_of_kept(p)).masked_fill(~keep, 0.0)

    return dropout
