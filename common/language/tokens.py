"""Positions of the tokens of a micro-batch, and what all blocks read about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Tokens:
    """What the halves of all blocks read about the tokens of a micro-batch.

    Attributes:
        rows: B.
        inference: whether no gradients are needed, so that nothing is kept and FP8 scales rest.
        numbers: (T,), see :class:`TokenPlaces`.
        own_numbers: (s,), the numbers of this rank's tokens.
        cos, sin: tables of the rotation, (T, D / 2) each; None without a rotation.
        seed: seed of the adapters' dropout; None for no dropout.
    """

    rows: int
    inference: bool
    numbers: Tensor
    own_numbers: Tensor
    cos: Tensor | None
    sin: Tensor | None
    seed: Tensor | None
