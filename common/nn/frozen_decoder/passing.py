"""Arguments and results of the halves of a frozen decoder. Shapes as in :mod:`common.nn.decoder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from common.ops.fp8_cast.reference import Handover


class Pair(NamedTuple):
    """Input and result of a half.

    Attributes:
        residual: residual stream (s, E) of this rank's tokens.
        delta: result of the last sub-layer (s, E), not yet added to ``residual``; None before the first block.
        handover: carries the FP8 gradient of ``delta`` back; None before the first block.
    """

    residual: Tensor
    delta: Tensor | None
    handover: Handover | None


@dataclass(frozen=True)
class Tokens:
    """Data about a micro-batch's tokens that all blocks read.

    Attributes:
        rows: B.
        numbers: (T,), see :class:`common.nn.lora.TokenPlaces`.
        own_numbers: (s,), the numbers of this rank's tokens.
        cos, sin: tables of the rotation, (T, D / 2) each.
        seed: seed of the dropout; None in an evaluation, which also freezes the FP8 scales.
    """

    rows: int
    numbers: Tensor
    own_numbers: Tensor
    cos: Tensor
    sin: Tensor
    seed: Tensor | None

    @property
    def resting(self) -> bool:
        """Whether FP8 scales are used but not updated."""
        return self.seed is None
