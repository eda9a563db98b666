"""Low-rank adapters of a decoder, and the positions of its tokens.

Hu et al., arXiv:2106.09685: ``y = x W^T + (alpha / r) dropout(x) A^T B^T``. Only the adapter's input has dropout. The
mask is a function of seed, call site and the element's index in the whole micro-batch. Thus no mask is stored, and
every split of tokens or columns over ranks drops the same elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.distributed.tensor_parallel.layers import Adapter, Dropout
from common.ops.dropout.reference import keep_mask, scale_of_kept, threshold


@dataclass(frozen=True)
class LoraSettings(Adapter):
    """Settings of low-rank adapters.

    Attributes:
        dropout: probability of dropping an element of an adapter's input.
    """

    dropout: float


@dataclass(frozen=True)
class TokenPlaces:
    """Positions of this rank's tokens.

    Attributes:
        rows: number of rows of the micro-batch.
        positions: int64 (T,), position of each token in its row.
        numbers: int64 (T,), index of each token in the whole micro-batch of all ranks that share it, row after row.
        seed: 0-d int64, seed of the dropout; None for no dropout (evaluation).
    """

    rows: int
    positions: Tensor
    numbers: Tensor
    seed: Tensor | None = None

    @classmethod
    def of(cls, rows: int, length: int, kept_S: Tensor, seed: Tensor | None = None) -> TokenPlaces:
        """Return the positions of some tokens of each row.

        Args:
            length: tokens of a whole row.
            kept_S: int64, columns of the tokens of this rank, the same in every row.
            seed: seed of the dropout; None for no dropout.
        """
        starts = torch.arange(rows, device=kept_S.device).unsqueeze(1) * length
        return cls(rows, kept_S.repeat(rows), (starts + kept_S).flatten(), seed)

    @classmethod
    def whole(
        cls, rows: int, length: int, seed: Tensor | None = None, device: torch.device | None = None
    ) -> TokenPlaces:
        """Return the positions for whole rows.

        Args:
            length: tokens of a row.
            seed: seed of the dropout; None for no dropout.
        """
        return cls.of(rows, length, torch.arange(length, device=device), seed)


def adapter_dropout(lora: LoraSettings | None, site: int, places: TokenPlaces) -> Dropout | None:
    """Return the dropout of an adapter; None if nothing is dropped.

    Args:
        lora: options of the adapters; None without adapters.
        site: number of the call site. Different sites draw independent masks.
    """
    seed = places.seed
    if lora is None or seed is None or threshold(lora.dropout) == 0:
        return None
    p = lora.dropout

    def dropout(x: Tensor, rows: Tensor, columns: int, first_column: int) -> Tensor:
        column = torch.arange(first_column, first_column + x.shape[1], device=x.device)
        keep = keep_mask(seed, site, rows.unsqueeze(1) * columns + column, p)
        return (x * scale_of_kept(p)).masked_fill(~keep, 0.0)

    return dropout
