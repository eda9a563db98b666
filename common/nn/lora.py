"""A matrix product whose weight may be frozen and carry a low-rank adapter.

Hu et al., arXiv:2106.09685: ``y = x W^T + (alpha / r) dropout(x) A^T B^T``. The dropout is on the adapter's input alone,
and its mask a function of seed, call site and the element's place in the whole micro-batch: nothing is stored, and every
split of the tokens over ranks drops the same elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.ranges import AtLeast, Positive, ProbabilityBelowOne
from common.ops.dropout.plain import keep_mask, scale_of_kept, threshold


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters.

    Attributes:
        rank: r.
        alpha: the adapter's output is multiplied with alpha / r.
        dropout: probability of dropping an element of the adapter's input.
    """

    rank: Annotated[int, AtLeast(1)]
    alpha: Annotated[float, Positive]
    dropout: Annotated[float, ProbabilityBelowOne]

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class TokenPlaces:
    """Where this rank's tokens stand.

    Attributes:
        rows: of the micro-batch.
        positions_T: int64, place of each token in its row.
        numbers_T: int64, place of each token in the micro-batch of all ranks that share it, rows after one another.
        seed: 0-d int64, of the dropout; None drops nothing (evaluation).
    """

    rows: int
    positions_T: Tensor
    numbers_T: Tensor
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


class Projection(nn.Module):
    """``x W^T`` without bias, with an adapter where asked.

    Args:
        in_features, out_features: columns and rows of the weight.
        device, dtype: of the parameters, left uninitialised.
        lora: the adapter; None for none.
        site: number of its dropout's call site.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraSettings | None = None,
        site: int = 0,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.lora, self.site = lora, site
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        if lora is not None:
            self.lora_a = nn.Parameter(torch.empty(lora.rank, in_features, device=device, dtype=dtype))
            self.lora_b = nn.Parameter(torch.empty(out_features, lora.rank, device=device, dtype=dtype))

    def forward(self, x_TI: Tensor, places: TokenPlaces) -> Tensor:
        """Map (T, in_features) to (T, out_features)."""
        y_TO = F.linear(x_TI, self.weight)
        if self.lora is None:
            return y_TO
        dropped = self.dropped(x_TI, places)
        return y_TO + self.lora.scale * F.linear(F.linear(dropped, self.lora_a), self.lora_b)

    def dropped(self, x_TI: Tensor, places: TokenPlaces) -> Tensor:
        """The adapter's input: ``x`` with dropout."""
        assert self.lora is not None
        p = self.lora.dropout
        if places.seed is None or threshold(p) == 0:
            return x_TI
        columns = torch.arange(self.in_features, device=x_TI.device)
        index_TI = places.numbers_T.unsqueeze(1) * self.in_features + columns
        keep = keep_mask(places.seed, self.site, index_TI, p)
        return (x_TI * scale_of_kept(p)).masked_fill(~keep, 0.0)
