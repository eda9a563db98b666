"""What passes between the halves of a frozen decoder. Shapes as in :mod:`common.nn.decoder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from common.ops.fp8_cast.reference import Handover


class Pair(NamedTuple):
    """What a half takes and gives.

    Attributes:
        residual: the residual stream of own tokens (s, E).
        delta: what is to be added to it (s, E); None before the first block.
        handover: of the delta's gradient.
    """

    residual: Tensor
    delta: Tensor | None
    handover: Handover | None


@dataclass(frozen=True)
class Tokens:
    """What all blocks need to know of a micro-batch's tokens.

    Attributes:
        rows: B.
        numbers: (T,), see :class:`common.nn.lora.TokenPlaces`.
        own_numbers: (s,), those of own tokens.
        cos, sin: (T, D / 2), the rotation.
        seed: of the dropout; None in an evaluation, in which scales rest as well.
    """

    rows: int
    numbers: Tensor
    own_numbers: Tensor
    cos: Tensor
    sin: Tensor
    seed: Tensor | None

    @property
    def resting(self) -> bool:
        """Whether FP8 scales are used and not moved."""
        return self.seed is None
